"""Who is behind, who left something out and who came late, from literal records; and the same of real ranks."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness.core.blame.culprits import assign_blame
from harness.core.blame.rank_exit import RankExit
from harness.core.evidence.records import Exit
from harness.core.launch import Inflight, Issued, Job, launch
from harness.core.launch.job import rank_file
from harness.core.launch.rank import note_failure
from harness.core.launch.supervise import is_advancing

LIMIT = "killed by the harness at the time limit of 5 s"
WORLD = (0, 1, 2)


def fate(rank: int, *issued: Issued, **more: Any) -> RankExit:
    """Killed at the time limit, unless `more` says otherwise."""
    given = tuple(replace(each, order=order) for order, each in enumerate(issued, 1))
    return RankExit(rank, **{"status": -9, "kill_reason": LIMIT, "issued": given, **more})


def gave_up(
    rank: int, *issued: Issued, message: str = "[/x/gloo/a.cc:7] Timed out waiting", time: float = 9.0
) -> RankExit:
    failure = {"type": "RuntimeError", "message": message, "time": time, "inside": []}
    return replace(fate(rank, *issued), status=1, kill_reason="", failure=failure)


def call(group: str, seq: int, op: str = "all_reduce", *, ranks: Sequence[int] = WORLD, **more: Any) -> Issued:
    return Issued(group, tuple(ranks), seq, op, 16, **more)


def making(seq: int, ranks: Sequence[int] = WORLD, **more: Any) -> Issued:
    op = "new_group" if seq else "init_process_group"
    return Issued(str(seq), tuple(ranks), seq, op, 0, **more)


def blamed(*fates: RankExit) -> list[int]:
    return [exit.rank for exit in assign_blame(fates) if exit.blamed]


@pytest.mark.parametrize("culprit", WORLD)
@pytest.mark.parametrize("status", [0, -9])
@pytest.mark.parametrize("message", ["", "Wait timeout", "wait timeout after 1000ms, keys: /default_pg/0//cpu//0/0"])
def test_a_rank_that_never_came_to_init_process_group_is_blamed(culprit: int, status: int, message: str) -> None:
    """Its stack is not known; the others wait, or one of them has given up."""
    gone = fate(culprit, status=status, kill_reason="" if status == 0 else LIMIT)
    others = [fate(rank, making(0)) for rank in WORLD if rank != culprit]
    if message:
        others[0] = gave_up(others[0].rank, making(0), message=message)
    assert blamed(*sorted([gone, *others], key=lambda each: each.rank)) == [culprit]


@pytest.mark.parametrize("culprit", WORLD)
def test_who_left_out_a_collective_of_a_second_group_is_blamed_whatever_its_number(culprit: int) -> None:
    left_out = (call("a", 0), call("a", 1))
    others = (call("a", 0), call("b", 0))
    assert blamed(*(fate(r, *(left_out if r == culprit else others)) for r in WORLD)) == [culprit]
    assert blamed(*(gave_up(r, *(left_out if r == culprit else others)) for r in WORLD)) == [culprit]


def test_of_two_ranks_that_left_out_what_the_other_waits_for_neither_is_right() -> None:
    pair = (0, 1)
    first = fate(0, call("a", 0, ranks=pair), call("b", 0, ranks=pair))
    second = fate(1, call("a", 0, ranks=pair), call("a", 1, ranks=pair))
    assert blamed(first, second) == [0, 1]


@pytest.mark.parametrize(("culprit", "waits"), [(0, 1), (1, 0)])
def test_who_made_no_group_is_blamed_also_where_most_only_passed_by(culprit: int, waits: int) -> None:
    """Group [0,1] is made by all; those who are no members of it do not wait, and have come to the next collective."""
    made = (making(0), making(1, (0, 1)))
    there = {rank: (*made, call("a", 0)) for rank in WORLD} | {waits: made, culprit: (making(0), call("a", 0))}
    assert blamed(*(fate(rank, *there[rank]) for rank in WORLD)) == [culprit]


def test_who_makes_groups_in_another_order_than_most_is_blamed() -> None:
    """Rank 2 is no member of the first one, and passed by."""
    usual = (making(1, (0, 1)), making(2, (1, 2)))
    assert blamed(fate(0, usual[0]), fate(1, making(1, (1, 2))), fate(2, *usual)) == [1]


@pytest.mark.parametrize("culprit", WORLD)
def test_who_counts_one_group_more_than_most_when_it_makes_the_same_is_blamed(culprit: int) -> None:
    """Torch names groups by their number: they do not find each other."""
    more = (making(1, (0, 1)), making(2))
    assert blamed(*(fate(r, making(0), *(more if r == culprit else (making(1),))) for r in WORLD)) == [culprit]
    exits = assign_blame([gave_up(r, making(0), *(more if r == culprit else (making(1),))) for r in WORLD])
    assert [(exit.blamed, exit.undelivered) for exit in exits] == [(r == culprit, "") for r in WORLD]


def test_who_made_a_group_by_another_name_did_not_leave_it_out() -> None:
    """Rank 1 made [0,1] first, so [0-2] has another name there; the others have come to the first collective."""
    usual = (making(1), making(2, (0, 1)), call("0", 0))
    assert blamed(fate(0, *usual), fate(1, making(1, (0, 1)), making(2)), fate(2, *usual)) == [1]


@pytest.mark.parametrize("culprit", [0, 1])
def test_who_makes_groups_in_another_order_is_blamed_alone_also_where_another_rank_went_on(culprit: int) -> None:
    """Gloo pairs what has one name: the other member of [0,1] comes to the first collective, and the rest wait."""
    four = (0, 1, 2, 3)
    made = (making(0, four), making(1, four), making(2, (0, 1)), call("0", 0, ranks=four))
    there = {rank: made[: 4 if rank < 2 else 2] for rank in four}
    there[culprit] = (making(0, four), making(1, (0, 1)), making(2, four))
    assert blamed(*(fate(rank, *there[rank]) for rank in four)) == [culprit]


def test_the_group_that_most_ranks_made_tells_who_made_them_in_another_order() -> None:
    """Of [0,1] only two names are known, and of [0-2] three."""
    usual = (making(0), making(1), making(2, (0, 1)))
    swapped = fate(0, making(0), making(1, (0, 1)), making(2))
    assert blamed(swapped, fate(1, *usual), fate(2, *usual[:2])) == [0]


def test_groups_that_only_their_members_make_are_no_disagreement() -> None:
    """Rank 3 made the group of its own, and sleeps; ranks 0 and 1 wait in the next one, rank 2 for it."""
    four = (0, 1, 2, 3)
    begun = {rank: (making(0, four), making(1, (0, 1) if rank < 2 else (2, 3))) for rank in four}
    waits = {rank: (*begun[rank], call("0", 0, ranks=four)) for rank in (0, 1)}
    waits |= {2: (*begun[2], making(2, (2, 3))), 3: begun[3]}
    assert blamed(*(fate(rank, *waits[rank]) for rank in four)) == [3]


@pytest.mark.parametrize("op", ["broadcast", "reduce", "gather", "scatter"])
def test_who_has_another_root_than_most_is_blamed(op: str) -> None:
    roots = (1, 2, 1)
    assert blamed(*(fate(rank, call("a", 3, op, root=roots[rank])) for rank in WORLD)) == [1]


def test_who_passes_another_type_of_as_many_bytes_is_blamed() -> None:
    types = ("float32", "int32", "float32")
    assert blamed(*(fate(rank, call("a", 3, dtype=types[rank])) for rank in WORLD)) == [1]


def test_of_two_that_disagree_both_are_blamed_whichever_others_wait_for() -> None:
    """Rank 1 waits for rank 0: that one may be stuck in the sum because rank 2 left it out."""
    receives = call("a", 0, "recv", peer=0)
    assert blamed(fate(0, call("a", 3)), fate(1, receives), fate(2, call("a", 3, "barrier"))) == [0, 2]


def test_who_comes_after_another_gave_up_is_blamed_and_not_the_network() -> None:
    late = gave_up(1, call("a", 3, time=9.5), message="[/x/gloo/a.cc:7] Connection closed by peer [::1]", time=9.6)
    early = [gave_up(rank, call("a", 3, time=1.0)) for rank in (0, 2)]
    exits = assign_blame([early[0], late, early[1]])
    assert [(exit.rank, exit.blamed, bool(exit.undelivered)) for exit in exits] == [
        (0, False, False),
        (1, True, False),
        (2, False, False),
    ]
    in_time = replace(late, issued=(call("a", 3, time=1.1),))
    assert [(e.blamed, bool(e.undelivered)) for e in assign_blame([early[0], in_time, early[1]])] == [(False, True)] * 3


def test_who_gave_up_on_a_late_comer_that_timed_out_as_well_is_not_blamed() -> None:
    refused = "Gloo connectFullMesh failed with [/x/gloo/a.cc:7] timed out connecting: Connection refused"
    late = gave_up(1, making(0, (0, 1), time=9.5), message=refused, time=11.0)
    exits = assign_blame([gave_up(0, making(0, (0, 1), time=1.0), message="Wait timeout"), late])
    assert [(exit.blamed, exit.undelivered) for exit in exits] == [(False, ""), (True, "")]


@pytest.mark.parametrize("next_op", ["barrier", "all_reduce"])
def test_the_rank_that_torchs_monitored_barrier_names_is_blamed(next_op: str) -> None:
    """By its place in the group. It went on to another collective, or sleeps."""
    pair = (1, 2)
    message = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms\n Original exception: Timed out"
    names = gave_up(1, call("a", 4, "barrier", ranks=pair), message=message)
    missing = [call("a", 4, ranks=pair)] if next_op == "all_reduce" else [call("a", 3, "barrier", ranks=pair)]
    assert blamed(fate(0, status=0, kill_reason=""), names, fate(2, *missing)) == [2]


def test_a_rank_that_the_barrier_names_and_that_itself_waits_is_a_victim() -> None:
    message = "[Rank 0]: Rank 1 failed to pass monitoredBarrier in 1000 ms"
    names = gave_up(0, call("a", 4, "barrier"), message=message)
    assert blamed(names, fate(1, call("a", 3), call("a", 0, "recv", peer=2)), fate(2, call("a", 3))) == [2]


def test_a_rank_that_waits_in_c_plus_plus_for_what_it_sent_does_not_compute(tmp_path: Path) -> None:
    """Work.wait() is in no Python stack; the line that calls it is."""
    source = tmp_path / "train.py"
    source.write_text("import torch\nsent.wait()\nx = 1\n")
    stack = 'main thread 0x00aa\nThread 0x00aa (most recent call first):\n  File "{}", line {} in step\n'
    sends = call("a", 0, "send", ranks=(0, 1), peer=1)
    sleeps = stack.format(source, 3)
    assert blamed(fate(0, sends, stack=stack.format(source, 2)), fate(1, stack=sleeps)) == [1]


@pytest.mark.parametrize(
    ("phase", "ranks", "works"), [("forward", (0, 1), True), ("background", (0, 1), False), ("forward", (0,), False)]
)
def test_a_job_goes_on_where_ranks_issue_collectives_with_others_that_belong_to_a_step(
    phase: str, ranks: tuple[int, ...], works: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rank_file(tmp_path, "inflight", 0)
    path.parent.mkdir()
    record = Inflight(path)
    monkeypatch.setattr("time.sleep", lambda _: record.issue("g", ranks, 0, "all_reduce", 4, 1, phase))
    assert is_advancing(Job(tmp_path, 1, "package:entry")) is works


# --- texts -----------------------------------------------------------------------------------------------------------


class NoText(Exception):
    def __str__(self) -> str:
        raise KeyError("text")

    __repr__ = __str__


class Equal(Exception):
    def __eq__(self, other: object) -> bool:
        raise KeyError("equal")

    __hash__ = Exception.__hash__


@pytest.mark.parametrize("error", [NoText(), RuntimeError("no file a\udc80b"), Equal("x"), RuntimeError("\ud800" * 9)])
def test_an_exception_without_a_text_that_can_be_had_or_written_is_reported(error: Exception, tmp_path: Path) -> None:
    again = RuntimeError("again")
    again.__cause__ = error
    error.__cause__ = Equal("circle")
    error.__cause__.__cause__ = error
    for number, raised in enumerate((error, again)):
        path = tmp_path / f"{number}.json"
        assert note_failure(raised, path) == 1
        failure = json.loads(path.read_text(encoding="utf-8"))
        assert failure["type"] == type(raised).__name__
        (exit,) = assign_blame([RankExit(0, 1, failure=failure)])
        assert exit.blamed and exit.error.encode("utf-8")
        assert type(error).__name__ in exit.error or failure["cause"]


# --- real ranks ------------------------------------------------------------------------------------------------------


def ended(folder: Path, entry: str, launcher: str = "local", world_size: int = 2, **more: Any) -> list[Exit]:
    limits = {"timeout": 60.0 if launcher == "torchrun" else 3.0, **more}
    return launch(Job(folder / "job", world_size, f"tests.launch_entries:{entry}", **limits), launcher)


def test_a_rank_that_leaves_before_it_joins_is_blamed(tmp_path: Path) -> None:
    victim, left = ended(tmp_path, "leaves_before_joining", "torchrun", group_timeout=3.0)
    assert [(victim.how, victim.blamed), (left.how, left.blamed)] == [("raised", False), ("ok", True)]


@pytest.mark.parametrize("entry", ["sleeps_in_c", "holds_the_gil"])
def test_the_look_wakes_no_rank_that_sleeps_in_c(tmp_path: Path, entry: str) -> None:
    """Had it woken, both ranks would have finished."""
    victim, sleeper = ended(tmp_path, entry)
    assert [(victim.how, victim.blamed), (sleeper.how, sleeper.blamed)] == [("killed", False), ("killed", True)]
    assert entry in sleeper.stack
    assert "#0" in sleeper.last_collective and "#1" in victim.last_collective


def test_an_exception_with_an_odd_text_is_the_reason(tmp_path: Path) -> None:
    victim, raised = ended(tmp_path, "raises_oddly")
    assert (victim.blamed, raised.how, raised.blamed) == (False, "raised", True)
    assert raised.error.startswith("OSError: ") and "\\udc80" in raised.error
