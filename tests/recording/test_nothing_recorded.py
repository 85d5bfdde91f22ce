"""Commands that leave no recording: what is reported as the reason."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Any

import pytest
from test_recorded_jobs import record

from harness.recording.injection import why_no_evidence


def test_a_job_that_ignores_its_environment_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path / "one", sys.executable, "-I", "-c", "pass") == 2
    assert "`python -I` ignores it" in " ".join(capsys.readouterr().out.split())


def test_a_job_that_trains_nothing_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path / "one", sys.executable, "-c", "pass") == 2
    assert "1 Python process ran, and none imported torch" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow(
    "a job; test_of_two_ranks_that_raised_the_one_that_lost_its_peer_is_not_the_one_quoted quotes literal ranks"
)
def test_what_a_job_raised_before_it_trained_is_quoted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert record(tmp_path / "one", sys.executable, "-c", "import torch, no_such_package") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 raised before training anything: ModuleNotFoundError: No module named 'no_such_package'" in printed
    assert record(tmp_path / "two", sys.executable, "-c", "import no_such_package, torch") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 Python process ran, and none imported torch; 1 raised before training anything: ModuleNotFound" in printed
    raises = (
        "import torch; raise RuntimeError('Caught OSError:\\nTraceback (most recent call last):\\nOSError: no data')"
    )
    assert record(tmp_path / "three", sys.executable, "-c", raises) == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 raised before training anything: RuntimeError: Caught OSError: OSError: no data" in printed


RENAMED = """
import importlib.util
import sys

class Renaming:
    done = False

    def find_spec(self, name, path=None, target=None):
        if name != MODULE or self.done:
            return None
        self.done = True
        spec = importlib.util.find_spec(name)
        execute = spec.loader.exec_module

        def executed(module):
            execute(module)
            delattr(OWNER, NAME)

        spec.loader.exec_module = executed
        return spec

sys.meta_path.insert(1, Renaming())
"""
TRAINS = """
import torch
import torch.distributed.pipelining
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters())
for _ in range(2):
    model(torch.ones(4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow(
    "a job each; the other tests of tests/recording/test_nothing_recorded.py tell why nothing was recorded"
)
@pytest.mark.parametrize(
    ("module", "owner", "name"),
    [
        ("torch", "module._C", "_current_graph_task_id"),
        ("torch.distributed.pipelining.schedules", "module", "_PipelineSchedule"),
    ],
)
def test_a_torch_that_lacks_what_the_recorder_relies_on_trains_on_and_is_not_judged(
    module: str, owner: str, name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: Any
) -> None:
    text = RENAMED.replace("MODULE", repr(module)).replace("OWNER", owner).replace("NAME", repr(name))
    (tmp_path / "sitecustomize.py").write_text(text, encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    code = record(tmp_path / "one", sys.executable, "-c", f"{TRAINS}\nopen({str(tmp_path / 'trained')!r}, 'w')")
    assert (tmp_path / "trained").exists()
    printed = capfd.readouterr()
    assert (code, printed.err.count("harness: ")) == (2, 1)
    assert f"{name}, by which" in printed.err
    assert f"{name}, by which" in " ".join(printed.out.split())


@pytest.mark.parametrize(
    ("source", "told"),
    [
        (
            "raise ValueError('no such setting')",
            "the launcher raised before any rank was started: ValueError: no such setting",
        ),
        ("raise SystemExit(2)", "no Python process that the launcher started, if it did start any, took PYTHONPATH"),
    ],
)
def test_a_launcher_that_ends_before_it_starts_a_rank_did_take_its_environment(
    source: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    launcher = tmp_path / "accelerate"
    launcher.write_text(source)
    assert record(tmp_path / "out", sys.executable, str(launcher), "launch", "train") != 0
    assert told in " ".join(capsys.readouterr().out.split())


def test_of_two_ranks_that_raised_the_one_that_lost_its_peer_is_not_the_one_quoted(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    for name, text in {
        "a": "RuntimeError: Connection closed by peer [10.0.0.1]:4242",
        "b": "ValueError: no such option",
    }.items():
        for state in ("started", "torch"):
            (tmp_path / "processes" / f"{name}.{state}").touch()
        (tmp_path / "processes" / f"{name}.raised").write_text(text)
    for state in ("started", "raised"):
        (tmp_path / "processes" / f"a helper.{state}").write_text("OSError: of a process that is no rank")
    told = why_no_evidence(tmp_path, ["torchrun", "train.py"], 1)
    assert told == "2 Python processes imported torch; 1 raised before training anything: ValueError: no such option"


@pytest.mark.parametrize(
    ("error", "first"),
    [
        (
            "RuntimeError: Connection closed by peer [10.0.0.1]:4242",
            "1 ended without an error (sys.exit, or killed: the command's output may say why), then ",
        ),
        ("ValueError: no such option", ""),
    ],
)
def test_a_rank_that_left_by_itself_is_told_where_others_only_lost_it(tmp_path: Path, error: str, first: str) -> None:
    (tmp_path / "processes").mkdir()
    for name in ("a.started", "a.torch", "b.started", "b.torch"):
        (tmp_path / "processes" / name).touch()
    (tmp_path / "processes" / "a.raised").write_text(error)
    told = why_no_evidence(tmp_path, ["torchrun", "train.py"], 1)
    assert told == f"2 Python processes imported torch; {first}1 raised before training anything: {error}"


def test_ranks_that_raised_the_same_but_for_their_number_are_counted_together(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    for rank in (0, 1):
        for state, text in (("started", ""), ("torch", ""), ("raised", f"ValueError: rank {rank} has no device")):
            (tmp_path / "processes" / f"here-{rank}.{state}").write_text(text)
    told = why_no_evidence(tmp_path, ["torchrun", "train.py"], 1)
    assert (
        told == "2 Python processes imported torch; 2 raised before training anything: ValueError: rank 0 has no device"
    )


def test_where_a_signal_came_before_a_rank_started_pythonpath_is_not_blamed(tmp_path: Path) -> None:
    (tmp_path / "processes").mkdir()
    told = why_no_evidence(tmp_path, ["torchrun", "train.py"], -signal.SIGINT)
    assert told.endswith("no rank's Python process had started") and "PYTHONPATH" not in told
