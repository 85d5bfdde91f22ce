"""What ranks under way do, in words: who waits for whom. Of literal fates; Ctrl-C itself is in tests/cli."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from harness.core.blame.calls import Issued
from harness.core.blame.rank_exit import RankExit
from harness.core.launch.job import Job
from harness.core.launch.standing import describe_ranks, job_label

AT_WORK = 'main thread 0x1\nThread 0x1 (most recent call first):\n  File "/my/train.py", line 7 in step\n'
WAITS = (
    'main thread 0x1\nThread 0x1 (most recent call first):\n  File "/x/torch/distributed/c.py", line 9 in all_reduce\n'
)


def fate(rank: int, seq: int = 0, stack: str = WAITS, ranks: tuple[int, ...] = (0, 1, 2), **more: object) -> RankExit:
    issued = tuple(Issued("g", ranks, number, "all_reduce", 8, 1, "backward") for number in range(1, seq + 1))
    return dataclasses.replace(RankExit(rank, None, issued=issued, stack=stack), **more)  # type: ignore[arg-type]


def said(*fates: RankExit) -> list[tuple[str, bool, str]]:
    """Ranks, whether they wait, and for whom or where."""
    found = []
    for line in describe_ranks(fates):
        who, waits, what = line.partition(", waiting for ")
        found.append((line[line.index("[") : line.index("]") + 1], bool(waits), what or who.partition("] ")[2]))
    return found


def test_who_is_behind_is_waited_for_by_the_others() -> None:
    assert said(fate(0, 5), fate(1, 4, AT_WORK), fate(2, 5)) == [
        ("[1]", False, "at /my/train.py:7 in step"),
        ("[0,2]", True, "[1]"),
    ]


def test_ranks_at_work_wait_for_none() -> None:
    assert said(*(fate(rank, 5, AT_WORK) for rank in range(3))) == [("[0-2]", False, "at /my/train.py:7 in step")]


def test_what_all_have_issued_lacks_no_rank() -> None:
    ((ranks, waits, what),) = said(*(fate(rank, 5) for rank in range(3)))
    assert (ranks, waits) == ("[0-2]", False) and "which no rank lacks" in what


def test_one_that_ended_or_was_stopped_or_reported_nothing_is_told_as_that() -> None:
    assert said(fate(0, 5), fate(1, 5, status=0), fate(2, 5, is_stopped=True), fate(3, stack=""))[1:] == [
        ("[1]", False, "ended"),
        ("[2]", False, "stopped (SIGSTOP or a debugger)"),
        ("[3]", False, "at a place that it did not report"),
    ]


@pytest.mark.parametrize(
    ("folder", "name"),
    [
        ("out/hsdp/run", "hsdp"),
        ("out/hsdp/saved_1", "hsdp, saved_1"),
        ("out/.reference/ab.partial", "reference"),
    ],
)
def test_a_job_is_called_as_its_case(folder: str, name: str) -> None:
    assert job_label(Job(Path(folder), 2, "x:y")) == name
