"""Ctrl-C is one line, exit code 130, and leaves no process."""

from __future__ import annotations

import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from interrupting import interrupt

from harness import ROOT
from harness.core.cli.interrupt import DEFAULT_HANDLERS, single_interrupt

AS_SIGINT = pytest.mark.slow("SIGINT ends a run in the same way")
PAIR = "cases: {pair: {why: a test, dims: {dp_replicate: 2}}}"


@pytest.mark.slow("real ranks; test_ctrl_c_says_which_rank_the_others_wait_for presses it once")
@pytest.mark.parametrize(
    "by", [signal.SIGINT, *(pytest.param(by, marks=AS_SIGINT) for by in (signal.SIGTERM, signal.SIGHUP))]
)
def test_ctrl_c_pressed_several_times_in_a_run_leaves_no_process_and_no_traceback(
    cases: Any, tmp_path: Path, by: signal.Signals
) -> None:
    arguments = ["run", "pair", *cases(PAIR), "--fault", "wrong.py:endless"]
    code, told = interrupt(arguments, when=(tmp_path / "alive").exists, cwd=tmp_path, times=3, by=by)
    first, *more = told.splitlines()
    assert (code, first) == (130, "harness: interrupted; nothing was judged, the ranks are killed")
    assert all(line.startswith("  pair+endless: rank") for line in more)


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_what_ends_a_command_lets_it_remove_its_temporary_folders(by: signal.Signals, tmp_path: Path) -> None:
    before = {number: signal.getsignal(number) for number in DEFAULT_HANDLERS}
    signal.signal(by, DEFAULT_HANDLERS[by])  # nohup ignores SIGHUP
    try:
        with pytest.raises(KeyboardInterrupt), single_interrupt(), tempfile.TemporaryDirectory(dir=tmp_path):
            os.kill(os.getpid(), by)
            time.sleep(60)
    finally:
        for number, usual in before.items():
            signal.signal(number, usual)
    assert list(tmp_path.iterdir()) == []


AS_RUN = pytest.mark.slow("run says it in the same way")
LATE = """
        if os.environ["RANK"] == "1":
            Path("alive").touch()
            __import__("time").sleep(600)
        dist.all_reduce(valid)
"""


@pytest.mark.parametrize(
    "command", [["run", "pair", "--fault", "wrong.py:late"], pytest.param(["matrix"], marks=AS_RUN)]
)
def test_ctrl_c_says_which_rank_the_others_wait_for(cases: Any, tmp_path: Path, command: list[str]) -> None:
    where = cases(PAIR)
    if command == ["matrix"]:
        text = (ROOT / "tests" / "own_trainer.py").read_text()
        Path("late_adapter.py").write_text(text.replace("\n        dist.all_reduce(valid)\n", LATE))

    def hangs() -> bool:
        return (tmp_path / "alive").exists() and time.time() - (tmp_path / "alive").stat().st_mtime > 2

    code, told = interrupt([*command, *where], when=hangs, cwd=tmp_path)
    lines = [line.split(": ", 1)[1] for line in told.splitlines() if line.startswith("  pair+")]
    late, waits = (next(line for line in lines if line.startswith(f"rank [{rank}]")) for rank in (1, 0))
    assert code == 130 and len(lines) == 2
    assert "waiting for [1]" in waits and "all_reduce" in waits
    assert "waiting" not in late and ("wrong.py" in late or "late_adapter.py" in late)


def test_ctrl_c_in_a_matrix_says_what_was_finished_and_leaves_no_process(cases: Any, tmp_path: Path) -> None:
    arguments = ["matrix", *cases("cases: {long: {why: a test, training: {steps: 500}}}")]
    code, told = interrupt(
        arguments, when=lambda: any(tmp_path.glob("out/.reference/*.partial/logs/*.log")), cwd=tmp_path
    )
    first, *more = told.splitlines()
    assert code == 130 and more[:1] == [line for line in more if line.startswith("  reference: rank [0] ")]
    assert first == "harness: interrupted after 0 of 1 cases; the same command with --resume runs the rest"
