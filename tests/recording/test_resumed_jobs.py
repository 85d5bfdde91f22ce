"""A recording of a job that resumed, judged by one that was not interrupted, in the same layout or another."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
from forked_jobs import Main

from harness.core.cli import main
from harness.core.evidence.recording import load_record, record_file, save_record
from harness.core.evidence.summary import summary_of

JOB = [sys.executable, str(Path(__file__).parents[1] / "resuming_job.py")]
TWO = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", JOB[1], "--fsdp"]


@dataclass(frozen=True)
class Straight:
    """A job that was not interrupted."""

    out: Path
    checkpoint: Path
    """Saved after step 2."""
    words: tuple[str, ...]
    """Its command."""


def straight(forked_main: Main, folder: Path, *words: str) -> Straight:
    told = ["--save-after", "2", "--checkpoint", str(folder / "saved")]
    assert forked_main(["record", "--steps", "1-4", "-o", str(folder / "one"), "--", *words, *told]) == 0
    return Straight(folder / "one", folder / "saved", words)


@pytest.fixture(scope="module")
def of_one_rank(tmp_path_factory: pytest.TempPathFactory, forked_main: Main) -> Straight:
    return straight(forked_main, tmp_path_factory.mktemp("one"), *JOB)


@pytest.fixture(scope="module")
def with_dropout(tmp_path_factory: pytest.TempPathFactory, forked_main: Main) -> Straight:
    return straight(forked_main, tmp_path_factory.mktemp("dropped"), *TWO, "--dropout", "0.1")


def resumed(
    forked_main: Main, by: Straight, out: Path, capsys: pytest.CaptureFixture[str], *job: str, forget: str = ""
) -> dict[str, Any]:
    """Return what is said of a job that goes on from the checkpoint, with the exit code."""
    told = ["--resume", "--checkpoint", str(by.checkpoint), "--forget", forget]
    code = forked_main(["record", "--same-as", str(by.out), "--after", "2", "-o", str(out), "--", *job, *told])
    capsys.readouterr()
    assert main(["compare", "--numbers", "--after", "2", "--json", str(by.out), str(out)]) == code
    return json.loads(capsys.readouterr().out) | {"exit": code}


@pytest.mark.slow("two jobs each; the first two are judged in the same way", after=2)
@pytest.mark.parametrize(
    ("forget", "check", "kind"),
    [
        ("weights", "initial_weights", "parameters not loaded"),
        ("layer", "initial_weights", "parameters changed over the checkpoint"),
        ("samples", "samples", "data position"),
        ("schedule", "recipe", "schedule starts anew"),
        ("optimizer", "optimizer_state", "optimizer state lost"),
    ],
)
def test_what_is_not_restored_is_named(
    forget: str,
    check: str,
    kind: str,
    of_one_rank: Straight,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    forked_main: Main,
) -> None:
    found = resumed(forked_main, of_one_rank, tmp_path / "out", capsys, *JOB, forget=forget)
    assert (found["verdict"], found["exit"]) == ("FAIL", 1)
    assert (found["cause"]["kind"], found["cause"]["explains"][0]) == (kind, check)


def test_a_job_may_resume_in_another_layout(
    of_one_rank: Straight, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    found = resumed(forked_main, of_one_rank, tmp_path / "out", capsys, *TWO)
    assert (found["verdict"], found["exit"], found["steps"]) == ("PASS", 0, [3, 4])


def test_a_recorder_that_failed_in_either_job_proves_nothing(
    of_one_rank: Straight, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    assert resumed(forked_main, of_one_rank, tmp_path / "out", capsys, *JOB)["verdict"] == "PASS"
    file = record_file(tmp_path / "out", 0)
    record = replace(load_record(file), failed=("the recorder itself raised KeyError()",))
    save_record(file, summary_of(record), record)
    words = ["compare", "--numbers", "--after", "2", "--json", str(of_one_rank.out), str(tmp_path / "out")]
    assert main(words) == 2
    found = json.loads(capsys.readouterr().out)
    assert found["verdict"] == "UNKNOWN" and "KeyError()" in found["unproven"]


@pytest.mark.slow("a job each; the first is judged in the same way", after=1)
def test_random_states_are_restored_on_every_rank(
    with_dropout: Straight, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    right = resumed(forked_main, with_dropout, tmp_path / "right", capsys, *with_dropout.words)
    assert (right["verdict"], right["exit"]) == ("PASS", 0)
    found = resumed(forked_main, with_dropout, tmp_path / "wrong", capsys, *with_dropout.words, forget="random")
    assert (found["verdict"], found["cause"]["kind"]) == ("FAIL", "random state not restored")
    assert dict(found["cause"]["details"])["ranks"] == [0, 1]


def test_the_scale_of_the_loss_is_restored(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    scaled = straight(forked_main, tmp_path, *JOB, "--scaled")
    assert resumed(forked_main, scaled, tmp_path / "right", capsys, *scaled.words)["verdict"] == "PASS"
    found = resumed(forked_main, scaled, tmp_path / "wrong", capsys, *scaled.words, forget="scale")
    assert (found["verdict"], found["cause"]["kind"]) == ("FAIL", "loss scale not restored")


def test_dropout_is_told_where_ranks_are_others(
    with_dropout: Straight, tmp_path: Path, capsys: pytest.CaptureFixture[str], forked_main: Main
) -> None:
    found = resumed(forked_main, with_dropout, tmp_path / "out", capsys, *JOB, "--dropout", "0.1")
    assert (found["verdict"], found["cause"]["kind"]) == ("FAIL", "not explained")
    assert "dropout" in found["cause"]["hint"]


def test_what_a_job_resumed_has_to_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["record", "--after", "2", "-o", str(tmp_path / "out"), "--", *JOB]) == 2
    assert "--same-as" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_a_step_that_was_not_recorded_judges_nothing(of_one_rank: Straight, capsys: pytest.CaptureFixture[str]) -> None:
    for step in ("4", "9"):  # none follows the fourth
        assert main(["compare", "--numbers", "--after", step, str(of_one_rank.out), str(of_one_rank.out)]) == 2
        assert f"--after {step}:" in capsys.readouterr().err
