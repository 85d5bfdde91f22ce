"""The same rules for runs, recordings and dumps: what is not on record blames no rank. Literal records, no ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from literal_dumps import save_dumps
from literal_recording import summary

from harness.core.blame.calls import Issued
from harness.core.blame.culprits import assign_blame, blame_of
from harness.core.blame.divergence import find_different_calls
from harness.core.blame.rank_exit import RankExit
from harness.core.blame.waits import JobCalls
from harness.core.evidence.recording import Last
from harness.recording.judged.recorded_calls import rank_exits_of
from harness.recording.judged.stored_recording import Recording
from harness.recording.traces.dumps import load_dumps
from harness.recording.traces.hang import hang_of

LIMIT = "killed by the harness at the time limit of 5 s"
LOST = "RuntimeError: [/x/gloo/pair.cc:5] Connection closed by peer [::1]"
WORLD = (0, 1, 2)


def reduce(seq: int, ranks: tuple[int, ...] = WORLD, group: str = "0", op: str = "all_reduce") -> Issued:
    return Issued(group, ranks, seq, op, 400, 2, "backward")


def killed(rank: int, *issued: Issued, **more: Any) -> RankExit:
    return RankExit(rank, **{"status": -9, "kill_reason": LIMIT, "issued": issued, **more})


def by_run(numbers: dict[int, int]) -> list[int]:
    return sorted(blame_of([killed(rank, reduce(number)) for rank, number in numbers.items()]).reasons)


def by_recording(numbers: dict[int, int]) -> list[int]:
    lasts = {rank: Last("all_reduce in step 2, backward", WORLD, "0", number) for rank, number in numbers.items()}
    ranks = {rank: summary(rank, 3, ended="") for rank in numbers}
    return sorted(blame_of(rank_exits_of(Recording(Path("r"), ranks, code=-9, last=lasts), 3)).reasons)


def by_dumps(numbers: dict[int, int], folder: Path) -> list[int]:
    issued = {}
    for rank, number in numbers.items():
        issued[rank] = [*[("all_reduce", 100, "0", "completed")] * 2, ("all_reduce", 100)][:number]
    return sorted(hang_of(load_dumps(sorted(save_dumps(folder, issued).iterdir()))).blamed)


@pytest.mark.parametrize("behind", WORLD)
def test_a_run_a_recording_and_dumps_of_one_hang_blame_the_same_rank(behind: int, tmp_path: Path) -> None:
    numbers = {rank: 2 if rank == behind else 3 for rank in WORLD}
    assert by_run(numbers) == by_recording(numbers) == by_dumps(numbers, tmp_path / "d") == [behind]


@pytest.mark.parametrize(
    ("counts", "is_complete", "awaited"),
    [({}, True, [2]), ({}, False, []), ({"0": 8}, False, [2]), ({"0": 9}, False, []), ({"0": None}, True, [])],
)
def test_a_rank_is_waited_for_only_where_it_is_known_how_much_it_issued(
    counts: dict[str, int | None], is_complete: bool, awaited: list[int]
) -> None:
    elsewhere = killed(2, reduce(4, (1, 2), "pair"), counts=counts, is_complete=is_complete)
    job = JobCalls([killed(0, reduce(9)), killed(1, reduce(9), reduce(4, (1, 2), "pair")), elsewhere])
    assert sorted(job.waits[0]) == awaited
    (wait,) = job.group_waits() or [job.group_wait(reduce(9))]
    assert (wait.behind, wait.unknown_ranks) == (
        tuple(awaited),
        (2,) if None in (counts.get("0", is_complete or None),) else (),
    )


def test_members_whose_call_is_not_on_record_could_be_the_majority() -> None:
    """Of five, two sums and a barrier are on record: both others may have issued a barrier."""
    five = (0, 1, 2, 3, 4)
    known = [killed(rank, reduce(9, five)) for rank in (0, 1)] + [killed(2, reduce(9, five, op="barrier"))]
    unseen = [killed(rank, counts={"0": 9}) for rank in (3, 4)]
    (calls,) = find_different_calls(JobCalls([*known, *unseen]))
    assert (calls.minority, calls.unknown_ranks) == ([0, 1, 2], (3, 4))
    (calls,) = find_different_calls(JobCalls([*known, *(killed(rank, counts={"0": 8}) for rank in (3, 4))]))
    assert (calls.minority, calls.unknown_ranks) == ([2], ())


def recorded(*lasts: Last, ended: tuple[str, ...], error: str = LOST) -> Recording:
    ranks = {
        rank: summary(rank, len(lasts), ended=ended[rank], error=error * (ended[rank] == "raised"), last=last)
        for rank, last in enumerate(lasts)
    }
    return Recording(Path("r"), ranks, code=1)


def last(number: int, text: str = "all_reduce in step 2, backward", **more: Any) -> Last:
    return Last(text, WORLD, "0", number, **more)


def test_of_ranks_that_vanished_while_another_lost_a_peer_those_that_were_waited_for_are_blamed() -> None:
    """A launcher kills the rest when one has died, and reports none of it."""
    gone = recorded(last(9), last(9), last(8), ended=("raised", "", ""))
    assert sorted(blame_of(rank_exits_of(gone, 3)).reasons) == [2]
    nothing_tells = recorded(last(9), last(9), last(9), ended=("raised", "", ""))
    assert blame_of(rank_exits_of(nothing_tells, 3)).reasons == {1: "", 2: ""}


def test_a_recorded_rank_that_lost_a_peer_is_not_blamed_alone_for_being_behind() -> None:
    """It was in that call: whether it came late is not on record."""
    all_lost = recorded(last(9), last(9), last(8), ended=("raised",) * 3)
    assert blame_of(rank_exits_of(all_lost, 3)).reasons == {0: "", 1: "", 2: ""}


def test_a_recorded_rank_that_went_on_without_a_collective_is_blamed_for_it() -> None:
    left = recorded(last(9), last(9), last(8), ended=("raised", "raised", "ok"))
    call = "all_reduce #9 of group [0-2] (step 2, backward)"
    assert blame_of(rank_exits_of(left, 3)).reasons == {2: f"exited while ranks 0, 1 waited for it in {call}"}


def test_numbers_of_a_group_with_sends_are_not_compared() -> None:
    """A recording counts sends in them, and a stage in the middle sends twice as often."""
    sends = last(9, before=("send in step 2, pipeline",))
    exits = rank_exits_of(recorded(sends, last(5), last(9), ended=("",) * 3), 3)
    assert [rank_exit.unlisted_count("0") for rank_exit in exits] == [None] * 3
    assert (JobCalls(exits).group_waits(), [rank_exit.issued for rank_exit in exits]) == ([], [()] * 3)


@pytest.mark.parametrize(
    ("text", "call"),
    [
        ("barrier in step 0, other", ("barrier", 0, "other")),
        ("broadcast in step 3", ("broadcast", 3, "")),
        ("all_gather in the background", ("all_gather", -1, "background")),
        ("something else", ("something else", -1, "")),
    ],
)
def test_a_text_of_a_stored_recording_is_read(text: str, call: tuple[str, int, str]) -> None:
    (issued,) = rank_exits_of(recorded(last(9, text), ended=("",)), 1)[0].issued
    assert (issued.op, issued.step, issued.phase, issued.bytes, issued.seq) == (*call, None, 9)


@pytest.mark.parametrize(
    ("status", "signal"), [(None, None), (0, None), (1, None), (-9, "SIGKILL"), (-70, "signal 70")]
)
def test_a_signal_is_named_only_where_the_status_has_one(status: int | None, signal: str | None) -> None:
    exits = [RankExit(0, status, kill_reason="killed by the harness"), RankExit(1, -9)]
    assert assign_blame(exits)[0].signal == signal
