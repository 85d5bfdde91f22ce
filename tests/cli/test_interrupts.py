"""Ctrl-C is one line, exit code 130, and leaves no process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from interrupting import interrupt

PAIR = "cases: {pair: {why: a test, dims: {dp_replicate: 2}}}"


def test_ctrl_c_pressed_several_times_in_a_run_leaves_no_process_and_no_traceback(cases: Any, tmp_path: Path) -> None:
    arguments = ["run", "pair", *cases(PAIR), "--fault", "wrong.py:endless"]
    code, told = interrupt(arguments, when=(tmp_path / "alive").exists, cwd=tmp_path, times=3)
    assert (code, told) == (130, "harness: interrupted; nothing was judged, the ranks are killed\n")


def test_ctrl_c_in_a_matrix_says_what_was_finished_and_leaves_no_process(cases: Any, tmp_path: Path) -> None:
    arguments = ["matrix", *cases("cases: {long: {why: a test, training: {steps: 500}}}")]
    code, told = interrupt(
        arguments, when=lambda: any(tmp_path.glob("out/.reference/*.partial/logs/*.log")), cwd=tmp_path
    )
    assert (code, told) == (
        130,
        "harness: interrupted after 0 of 1 cases; the same command with --resume runs the rest\n",
    )
