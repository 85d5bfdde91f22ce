"""How ranks of a recorded job ended: what is known of it, and by whom. Literal summaries, no ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal_recording import summary

from harness.core.blame.culprits import blame_of
from harness.core.evidence.recording import Last
from harness.core.evidence.records import Exit
from harness.core.evidence.text import ranks_text
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.recorded_calls import rank_exits_of
from harness.recording.judged.recorded_ends import exits_of, why_exits_unknown
from harness.recording.judged.stored_recording import Recording
from harness.recording.pages.recording_page import anomaly_rows

LOST = "RuntimeError: Timed out waiting 8000ms for recv operation to complete (gloo)"
LAST = Last("all_reduce in step 5, backward", (0, 1), "g", 9)


def ended(*hows: str, **told: Any) -> Recording:
    errors = {"raised": "RuntimeError: Connection closed by peer [10.0.0.1]:4242"}
    ranks = [summary(rank, len(hows), ended=how, error=errors.get(how, "")) for rank, how in enumerate(hows)]
    return Recording(Path("run"), {one.rank: one for one in ranks}, **told)


def exits(recording: Recording) -> list[Exit]:
    return list(exits_of(recording, recording.world))


def test_ranks_that_left_by_os_exit_with_code_0_ended_well() -> None:
    job = ended("", "", code=0, exits={0: 0, 1: 0})
    assert [one.how for one in exits(job)] == ["ok", "ok"]
    assert (why_exits_unknown(exits_of(job, 2), job), anomaly_rows(job)) == ("", [])


def test_a_rank_that_was_not_heard_of_is_not_known_to_have_ended_well_whatever_the_command_says() -> None:
    job = ended("ok", "", code=0)
    assert why_exits_unknown(exits_of(job, 2), job) == (
        "the exit of ranks [1] is not reported; the command ended with exit code 0"
    )
    assert anomaly_rows(job) == [
        (
            "ENDED UNHEARD",
            "rank 1, exit not reported; the command ended with exit code 0; before any collective",
        )
    ]


def test_an_exit_code_that_the_launcher_tells_is_the_ranks_own() -> None:
    job = ended("ok", "ok", code=1, exits={0: 3, 1: -15})
    first, other = exits(job)
    assert (first.how, first.code, first.error, first.blamed) == ("raised", 3, "exited with code 3", True)
    assert (other.how, other.error, other.blamed) == ("killed", "SIGTERM after another had ended", False)
    assert [text for _, text in anomaly_rows(job)] == [
        "rank 0: exit code 3; Python had begun to end by itself",
        "rank 1: SIGTERM, most likely sent by its launcher after another had ended; Python had begun to end by itself",
    ]


def test_who_raised_is_blamed_and_who_lost_that_peer_is_not_unless_there_is_nobody_else() -> None:
    job = ended("raised", "raised", code=1)
    assert [one.blamed for one in exits(job)] == [True, True]
    own = summary(1, 2, ended="raised", error="RuntimeError: data is broken")
    job = Recording(Path("run"), job.summaries | {1: own}, code=1)
    assert [one.blamed for one in exits(job)] == [False, True]


def test_who_died_by_a_signal_is_blamed_with_the_collective_that_it_was_in_and_comes_before_who_lost_it() -> None:
    job = ended("", "raised", code=1, exits={0: -11, 1: 1}, last={0: LAST})
    first, other = exits(job)
    assert (first.how, first.signal, first.last_collective, first.blamed) == ("signal", "SIGSEGV", LAST.text, True)
    assert other.how == "raised"
    assert [label for label, _ in anomaly_rows(job)] == ["ENDED", "RAISED"]
    assert anomaly_rows(job)[0][1].startswith(
        "rank 0: SIGSEGV; last collective: all_reduce in step 5, backward over [0,1]"
    )


def test_ranks_of_which_nothing_tells_who_was_first_did_not_only_wait() -> None:
    assert [(one.how, one.blamed) for one in exits(ended("", "", code=-9))] == [("killed", True)] * 2


def test_a_rank_that_vanished_is_blamed_before_who_lost_it() -> None:
    """It was killed, and what started it reports no exit, as Lightning's own launcher."""
    job = ended("raised", "", code=1)
    assert [(one.how, one.blamed) for one in exits(job)] == [("raised", False), ("killed", True)]
    assert [label for label, _ in anomaly_rows(job)] == ["ENDED UNHEARD", "RAISED"]


def test_a_command_that_ended_badly_is_told_where_no_rank_is_known_to_have() -> None:
    job = ended("ok", "ok", code=3)
    assert why_exits_unknown(exits_of(job, 2), job).startswith(
        "the command ended with exit code 3, and of no rank it is known"
    )
    assert anomaly_rows(job) == [("ENDED", "the command, with exit code 3; no rank is known to have ended so")]


def waiting(*lasts: Last, exits: dict[int, int] | None = None) -> Recording:
    """A job whose ranks all lost each other, each in this collective, or were ended by their launcher then."""
    ranks = {
        rank: summary(rank, len(lasts), ended="" if rank in (exits or {}) else "raised", error=LOST, last=last)
        for rank, last in enumerate(lasts)
    }
    return Recording(Path("run"), ranks, code=1, exits=exits or {})


def last(op: str, ranks: int, group: str = "0", number: int = 5, **more: Any) -> Last:
    return Last(f"{op} in step 2, other", tuple(range(ranks)), group, number, **more)


@pytest.mark.parametrize("group", ["0", "1"])
@pytest.mark.parametrize("odd", [0, 2, 3])
def test_the_rank_that_waits_in_a_barrier_while_all_others_wait_in_one_other_collective_is_blamed(
    odd: int, group: str
) -> None:
    """In the same place of a group, or as a first collective over another one."""
    usual = last("all_reduce", 4, group, elsewhere={"0": 4}, number=5 if group == "0" else 1)
    barrier = last("barrier", 4, elsewhere={})
    job = waiting(*(barrier if rank == odd else usual for rank in range(4)))
    found = exits(job)
    assert [one.rank for one in found if one.blamed] == [odd]
    others = ranks_text([rank for rank in range(4) if rank != odd])
    number = 5 if group == "0" else 1
    step = "(step 2 or behind it, outside of passes)"
    own, usual_call = f"barrier #5 of group [0-3] {step}", f"all_reduce #{number} of group [0-3] {step}"
    if group == "0":
        assert found[odd].reason == f"issued {own} where ranks {others} issued {usual_call}" and found[odd].diverged
    else:
        assert f"rank {odd} in {own} named '0'" in found[odd].reason
        assert f"ranks {others} in {usual_call} named '1'" in found[odd].reason
    (row,) = [one for one in find_anomalies(job) if one.label == "CALLS DIFFER"]
    assert odd in row.ranks


def test_ranks_that_their_launcher_ended_after_the_others_lost_them_are_not_blamed() -> None:
    usual, barrier = last("all_reduce", 4, "1", 1, elsewhere={"0": 4}), last("barrier", 4, elsewhere={})
    found = exits(waiting(usual, usual, usual, barrier, exits={0: -15, 1: -15}))
    assert [(one.how, one.blamed) for one in found] == [
        ("killed", False),
        ("killed", False),
        ("raised", False),
        ("raised", True),
    ]


@pytest.mark.parametrize(
    "lasts",
    [
        (last("all_reduce", 2), last("barrier", 2)),
        (last("all_reduce", 2, "1", 1, elsewhere={"0": 4}), last("barrier", 2, elsewhere={})),
    ],
)
def test_of_two_ranks_each_says_what_it_issued_and_neither_is_blamed_before_the_other(lasts: tuple[Last, ...]) -> None:
    found = exits(waiting(*lasts))
    assert [("all_reduce #" in one.reason, "barrier #5" in one.reason) for one in found] == [(True, True)] * 2
    assert {one.blamed for one in found} == {True}


@pytest.mark.parametrize(
    "lasts",
    [
        (last("barrier", 4), last("barrier", 4), last("all_reduce", 4), last("all_reduce", 4)),
        (last("barrier", 4), last("all_reduce", 4), last("broadcast", 4), last("all_reduce", 4)),
        (last("barrier", 4), *[last("all_reduce", 4, "1", 1, elsewhere=None)] * 3),  # how many over "0" is not on record
        (last("barrier", 4, elsewhere={"1": 1}), *[last("all_reduce", 4, "1", 1, elsewhere={"0": 4})] * 3),  # it is ahead
        (last("barrier", 4, elsewhere={}), *[replace(last("all_reduce", 4, "1", 1, elsewhere={"0": 4}), ranks=(1, 2, 3))] * 3),
    ],
)  # fmt: skip
def test_without_one_rank_against_all_others_nobody_is_the_odd_one(lasts: tuple[Last, ...]) -> None:
    assert len(blame_of(rank_exits_of(waiting(*lasts), 4)).reasons) != 1
