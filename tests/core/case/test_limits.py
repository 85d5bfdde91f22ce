"""What is too large, or no name of anything, is told before any work, in one message."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from harness import ROOT
from harness.core.case.case import Case, CaseError
from harness.core.case.limits import MOST_YAML_NODES, start_problem
from harness.core.case.loading import load_cases
from harness.core.case.variants import with_seed
from harness.core.launch.job import Job
from harness.core.run.folders import folder_of, name_without_source, trainer_label
from harness.core.run.options import Options
from harness.reference.config import TrainingConfig

BOMB = "\n".join(["a0: &a0 [x]", *(f"a{n + 1}: &a{n + 1} [{', '.join([f'*a{n}'] * 10)}]" for n in range(30))])
AXES = ", ".join("a%d: {%s}" % (axis, ", ".join(f"_{n}: {{}}" for n in range(12))) for axis in range(7))  # noqa: UP031


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "some.yaml"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(CaseError) as error:
        load_cases(path)
    return str(error.value).removeprefix(f"{path}: ")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("training: {steps: 1000000000}", "steps 1000000000 is more than the 10000 that a case may have"),
        ("training: {seed: -1}", "seed must be at least 0, got -1"),
        ("model: {rope_theta: .nan}", "model: rope_theta must be positive and finite, got nan"),
        ('training: {data: "a\\0b"}', "training: data: no file has a NUL in its name"),
        ("training: {global_batch: 1000000, seq_len: 1000}", "global_batch x seq_len = 1000000000 tokens a step"),
        ("model: {n_layers: 1000000000}", "n_layers 1000000000 is more than the 512 that a case may have"),
        ("model: {dim: 8000000000}", "dim 8000000000 is more than the 1048576 that a case may have"),
        ("model: {name: ../../x}", "model: name '../../x': letters, digits, '_', '.' and '-' only"),
        ("model: {name: /abs}", "model: name '/abs': letters"),
        ('model: {name: "a\\0b"}', "model: name 'a\\x00b': letters"),
        (f"model: {{name: {'x' * 5000}}}", "model: name 'xxxx"),
        ("dims: {dp_replicate: 1000000}", "1000000 ranks, more than 131072"),
        ("dims: {dp_shard: 1" + "0" * 4000 + "}", "ranks, more than 131072"),
    ],
)
def test_what_is_too_large_or_no_name_is_one_short_message(tmp_path: Path, said: str, told: str) -> None:
    message = refusal(tmp_path, f"cases: {{one: {{why: a test, {said}}}}}")
    assert message.startswith("case 'one': ") and told in message and len(message) < 500


@pytest.mark.parametrize("name", ["../../x", "/abs", '"a\\0b"', "x" * 300, "."])
def test_a_cases_name_is_no_path(tmp_path: Path, name: str) -> None:
    message = refusal(tmp_path, f"cases: {{{name}: {{why: a test}}}}")
    assert "a name is made of letters" in message or "a name has at most 100 letters" in message


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[" * 100_000, "not valid YAML: nested too deeply"),
        (BOMB, f"values, counting what each alias stands for, more than {MOST_YAML_NODES}"),
        ("cases: &again [*again]", "not valid YAML: line 1: an alias within what it stands for"),
        (f"matrix: [{{each: {{{AXES}}}}}]", "matrix entry 1: 35831808 combinations, more than 10000"),
        ("cases: 1" + "0" * 5000, "not valid YAML: Exceeds the limit"),
        ("cases: 2024-02-32", "not valid YAML: day is out of range for month"),
    ],
)
def test_a_file_that_would_take_all_memory_is_refused_at_once(tmp_path: Path, text: str, told: str) -> None:
    message = refusal(tmp_path, text)
    assert told in message and len(message) < 500


def test_a_step_of_a_cluster_is_planned_and_not_started_here() -> None:
    large = Case("large", "a test", training=TrainingConfig(global_batch=4096, seq_len=8192))
    assert start_problem(large).startswith("33554432 tokens a step, more than the 16777216 of a run; `harness plan`")


def test_another_seed_than_there_is_is_refused() -> None:
    with pytest.raises(CaseError, match="seed must be at least 0, got -5"):
        with_seed(Case("one", "a test"), -5)


def test_sources_seeds_and_devices_have_folders_of_their_own() -> None:
    case = Case("one", "a test", file="cases/some.yaml")
    options = [Options(), *(Options(trainer=f"torchtitan@{source}") for source in ("/a/titan", "/b/titan", "/b/../c"))]
    options += [Options(device="cuda"), Options(fault="x.py:wrong"), Options(trainer="torchtitan")]
    folders = [*(folder_of(case, one) for one in options), folder_of(with_seed(case, 7), Options())]
    assert len(set(folders)) == len(folders)
    assert (str(folders[0]), str(folders[-1])) == ("out/one", "out/one+seed_7")
    assert {folder.parent for folder in folders} == {Path("out")}
    assert name_without_source(folders[1].name) == "one+torchtitan"
    assert "/" not in trainer_label("mine.py@/a/../b c?#;")


def test_what_is_written_and_read_is_utf_8_whatever_the_locale(tmp_path: Path) -> None:
    (tmp_path / "some.yaml").write_text("cases: {größe: {why: Größer als Ærø.}}", encoding="utf-8")
    plain = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "harness", "matrix", "--list", "--cases", str(tmp_path)]
    done = subprocess.run(command, env=os.environ | plain, capture_output=True)
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfe" in done.stdout


class Writing:
    """Ranks that never end by themselves."""

    def __init__(self) -> None:
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.hosts: dict[int, str] = {}
        self.gone, self.trouble = False, ""

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        return done()

    def signal(self, number: int) -> None:
        if number == signal.SIGKILL:
            self.statuses = dict.fromkeys(range(2), -signal.SIGKILL)


def test_a_rank_that_writes_without_end_does_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    supervise = importlib.import_module("harness.core.launch.supervise")
    monkeypatch.setattr(supervise, "MAX_LOG_BYTES", 1000)
    monkeypatch.setattr(supervise, "STACK_PATIENCE", 0.0)
    (tmp_path / "logs").mkdir()
    for rank, letters in enumerate((10, 1001)):
        (tmp_path / "logs" / f"rank_{rank:02d}.log").write_bytes(b"x" * letters)
    fates = supervise.supervise(Job(tmp_path, 2, "", timeout=3600.0), Writing())
    assert {fate.kill_reason for fate in fates} == {
        "killed by the harness after rank 1 wrote more than 0.001 MB into its log"
    }
