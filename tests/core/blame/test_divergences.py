"""Whose call is the odd one: by the members of its group, and by groups that do the same. Literal records, no ranks."""

from __future__ import annotations

from typing import Any

import pytest

from harness.core.blame.calls import Issued
from harness.core.blame.culprits import blame_of
from harness.core.blame.rank_exit import RankExit

LIMIT = "killed by the harness at the time limit of 5 s"
FOURS = ((0, 1, 2, 3), (4, 5, 6, 7))
WORLD = (0, 1, 2)


def issued(ranks: tuple[int, ...], seq: int, op: str, size: int = 16, **more: Any) -> Issued:
    return Issued("".join(map(str, ranks)), ranks, seq, op, size, 1, "forward", **more)


def blamed(calls: dict[int, list[Issued]]) -> list[int]:
    exits = [RankExit(rank, -9, kill_reason=LIMIT, issued=tuple(each)) for rank, each in calls.items()]
    return sorted(blame_of(exits).reasons)


def pair(rank: int, seq: int, op: str, size: int = 16) -> Issued:
    return issued((rank % 4, rank % 4 + 4), seq, op, size)


def four(rank: int, seq: int, op: str) -> Issued:
    return issued(FOURS[rank // 4], seq, op)


@pytest.mark.parametrize("odd", [3, 7])
def test_the_rank_that_left_out_a_collective_of_its_pair_is_blamed_by_the_sequences_of_other_pairs(odd: int) -> None:
    """Its partner waits in that one, so all of the partner's four wait for the partner."""
    partner = (odd + 4) % 8
    calls = {}
    for rank in range(8):
        calls[rank] = [pair(rank, 0, "all_gather"), four(rank, 0, "all_gather"), pair(rank, 1, "reduce_scatter")]
        if rank // 4 == partner // 4:
            calls[rank] = calls[rank][:2]
    calls[partner] = [pair(partner, 0, "all_gather")]
    calls[odd] = [four(odd, 0, "all_gather"), pair(odd, 0, "reduce_scatter")]
    assert blamed(calls) == [odd]


@pytest.mark.parametrize("others", ["none", "another size", "two kinds"])
def test_where_no_other_pair_tells_both_ranks_of_a_pair_are_blamed(others: str) -> None:
    calls = {3: [pair(3, 0, "all_gather")], 7: [pair(7, 0, "reduce_scatter")]}
    size = 32 if others == "another size" else 16
    ops = ("all_gather", "reduce_scatter") if others == "two kinds" else ("all_gather",) * 2
    if others != "none":
        for rank in (0, 4):
            calls[rank] = [pair(rank, 0, ops[0], size)]
            calls[rank + 1] = [pair(rank + 1, 0, ops[1], size)]
    assert blamed(calls) == [3, 7]


@pytest.mark.parametrize("op", ["gather", "scatter", "all_reduce", "all_gather"])
@pytest.mark.parametrize("changes", [{"size": 32}, {"dtype": "int32"}])
def test_another_size_or_dtype_on_one_rank_blames_it(op: str, changes: dict[str, Any]) -> None:
    usual = {"dtype": "float32"}
    assert blamed({rank: [issued(WORLD, 4, op, **usual | (changes if rank == 1 else {}))] for rank in WORLD}) == [1]


def test_ranks_of_an_all_to_all_may_pass_other_numbers_of_rows_and_no_other_dtype() -> None:
    sizes = [16, 16, 32]
    rows = {rank: [issued(WORLD, 4, "all_to_all", sizes[rank], dtype="float32")] for rank in WORLD}
    assert blamed(rows) == [0, 1, 2], "nothing tells"
    dtypes = ["float32", "float32", "int32"]
    assert blamed({rank: [issued(WORLD, 4, "all_to_all", dtype=dtypes[rank])] for rank in WORLD}) == [2]


def p2p(op: str, peer: int | None, seq: int) -> Issued:
    return issued(WORLD, seq, op, peer=peer)


@pytest.mark.parametrize(("turn", "culprits"), [(0, [0, 2]), (3, [0])])
def test_who_sends_to_a_wrong_peer_of_a_ring_is_blamed_alone_only_where_it_sent_to_the_right_one_before(
    turn: int, culprits: list[int]
) -> None:
    """Each receives from the rank before it. Rank 0 sends to 2; that one is done, and waits in the next sum."""
    calls = {
        0: [*[p2p("send", 1, turn - 1)] * bool(turn), p2p("recv", 2, turn), p2p("send", 2, 0)],
        1: [p2p("send", 2, turn), p2p("recv", 0, turn)],
        2: [p2p("send", 0, turn), p2p("recv", 1, turn), issued(WORLD, 5, "all_reduce")],
    }
    assert blamed(calls) == culprits


def test_in_a_pipeline_the_stage_that_receives_nothing_is_blamed_and_not_the_one_that_sends_to_it() -> None:
    """Stage 0 waits for gradients of stage 1, which has sent to stage 2 before."""
    calls = {
        0: [p2p("send", 1, 4), p2p("recv", 1, 2)],
        1: [p2p("recv", 0, 4), p2p("send", 0, 1), p2p("send", 2, 3)],
        2: [p2p("recv", 1, 2)],
    }
    assert blamed(calls) == [2]


@pytest.mark.parametrize(("received", "culprits"), [(0, [2]), (1, [2])])
def test_a_receive_from_any_source_waits_for_those_that_sent_to_it_before(received: int, culprits: list[int]) -> None:
    """Rank 0 waits for rank 1 in a sum. Rank 1 receives from rank 2 as a rule, which sleeps."""
    sent = [p2p("send", 1, received - 1)] * bool(received)
    calls = {0: [issued(WORLD, 5, "all_reduce")], 1: [p2p("recv", None, received)], 2: sent}
    calls[2] = [*calls[2], issued(WORLD, 4, "all_reduce")]
    calls[1] = [issued(WORLD, 4, "all_reduce"), *calls[1]]
    assert blamed(calls) == culprits


def test_a_receive_from_any_source_that_was_answered_waits_for_none() -> None:
    calls = {0: [issued(WORLD, 5, "all_reduce")], 1: [issued(WORLD, 4, "all_reduce"), p2p("recv", None, 1)]}
    calls[2] = [p2p("send", 1, 1), issued(WORLD, 5, "all_reduce")]
    assert blamed(calls) == [1]


@pytest.mark.parametrize(("ended", "culprits"), [((1, 2), [0]), ((1,), [1])])
def test_who_issues_one_collective_more_than_most_that_ended_is_blamed(
    ended: tuple[int, ...], culprits: list[int]
) -> None:
    """Of three: one that ended before two others left early, two that ended leave one that went on."""
    lost = {"type": "RuntimeError", "message": "[/x/gloo/a.cc:7] Connection closed by peer", "time": 2.0, "inside": []}
    exits = []
    for rank in WORLD:
        calls = tuple(issued(WORLD, seq, "barrier", 0) for seq in ((4,) if rank in ended else (4, 5)))
        end = {"status": 0, "end_time": 1.0} if rank in ended else {"status": 1, "failure": lost}
        exits.append(RankExit(rank, **end, issued=calls))
    reasons = blame_of(exits).reasons
    assert sorted(reasons) == culprits
    if culprits == [0]:
        call = "barrier #5 of group [0-2] (step 1, forward, 0 B)"
        assert reasons[0] == f"issued {call} where ranks [1,2] exited with code 0"
