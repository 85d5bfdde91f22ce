"""What the ranks of a group issued, in order: who issued something else, and who waits for whom."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum

from harness.core.evidence.records import IN_A_RING
from harness.core.evidence.text import ranks_text
from harness.core.launch.inflight import GROUP_CREATION, Issued
from harness.core.launch.rank_exit import RankExit, failure_time, has_timed_out, is_busy

GroupKey = tuple[str, tuple[int, ...]]  # a group, by name and members: two groups of one split can share a name
EQUAL_BYTES = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}  # every member passes as many
POINT_TO_POINT = {"send": "recv", "recv": "send"}  # and what the other side does


def group_key(issued: Issued) -> GroupKey:
    return issued.group, issued.ranks


def participants(issued: Issued, fates: Sequence[RankExit]) -> list[RankExit]:
    """Return those who take part: all ranks in init_process_group."""
    return [fate for fate in fates if issued.op == GROUP_CREATION[0] or fate.rank in issued.ranks]


def collectives_of(fate: RankExit) -> list[Issued]:
    """Without sends and receives, which are counted for each pair of ranks, and without the making of groups."""
    return [each for each in fate.issued if each.op not in POINT_TO_POINT and each.op not in GROUP_CREATION]


def groups_with_collectives(fates: Iterable[RankExit]) -> list[GroupKey]:
    """Groups over which collectives ran: their members must issue the same sequence."""
    return list(dict.fromkeys(group_key(each) for fate in fates for each in collectives_of(fate)))


def find_disagreeing(fates: Sequence[RankExit]) -> dict[int, str]:
    """Return the minority at the first place, in time, where members issued different collectives. If there is none, return the
    ranks that torch's monitored_barrier named there, or the one that most others wait for; else all."""
    calls_by_position: dict[tuple[GroupKey, int], dict[int, Issued]] = defaultdict(dict)
    for fate in fates:
        for each in collectives_of(fate):
            calls_by_position[group_key(each), each.seq][fate.rank] = each
    disagreements = [
        (max(each.time for each in issued.values()), seq, issued)
        for (_, seq), issued in calls_by_position.items()
        if minority_of({rank: call_signature(each) for rank, each in issued.items()})
    ]
    if not disagreements:
        return mismatched_sends(fates)
    _, _, issued = min(disagreements, key=lambda each: each[:2])
    minority_ranks = minority_of({rank: call_signature(each) for rank, each in issued.items()})
    missed = {
        rank for fate in fates for rank, each in absent_from_barrier(fate).items() if each == issued.get(fate.rank)
    }
    minority_ranks = [rank for rank in minority_ranks if rank in missed] or most_awaited_ranks(minority_ranks, fates)
    return {rank: disagreement_text(rank, issued) for rank in minority_ranks}


def most_awaited_ranks(ranks: list[int], fates: Sequence[RankExit]) -> list[int]:
    """Return the one of these for which most of the other ranks wait; all of them if there is none."""
    waits_of_others = [calls_waited_for(fate, fates) for fate in fates if fate.rank not in ranks]
    counts = Counter(rank for waits in waits_of_others for rank in waits if rank in ranks).most_common()
    has_clear_winner = counts and (len(counts) == 1 or counts[0][1] > counts[1][1])
    return [counts[0][0]] if has_clear_winner else ranks


def mismatched_sends(fates: Sequence[RankExit]) -> dict[int, str]:
    """A send and its receive of different sizes: neither side is known to be right."""
    for fate in fates:
        for sent in (each for each in fate.issued if each.op == "send"):
            received = next((each for each in calls_of_peer(fate, sent, fates) if each.seq == sent.seq), None)
            if received is not None and (received.bytes, received.dtype) != (sent.bytes, sent.dtype):
                issued = {fate.rank: sent, sent.peer: received}
                return {rank: disagreement_text(rank, issued) for rank in issued}  # type: ignore[misc, arg-type]
    return {}


def calls_of_peer(fate: RankExit, issued: Issued, fates: Sequence[RankExit]) -> list[Issued]:
    """Return what the peer received of a send by this rank over that group, or the other way round; oldest first."""
    peer = next((peer for peer in fates if peer.rank == issued.peer), None)
    answer = POINT_TO_POINT[issued.op]
    issued_by_peer = peer.issued if peer else ()
    return [
        call
        for call in issued_by_peer
        if call.op == answer and group_key(call) == group_key(issued) and call.peer in (fate.rank, None)
    ]


def call_signature(issued: Issued) -> Hashable:
    """Return what the calls of all members of a group must have in common."""
    has_equal_bytes = issued.op in EQUAL_BYTES or issued.op in POINT_TO_POINT
    return issued.op, issued.root, (issued.bytes, issued.dtype) if has_equal_bytes else None


def minority_of(signatures: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks that differ from most; all of them where two answers are as frequent, [] where all are alike."""
    counts = Counter(signatures.values()).most_common()
    if len(counts) < 2:
        return []
    usual_signature = counts[0][0] if counts[0][1] > counts[1][1] else None
    return [rank for rank, each in signatures.items() if each != usual_signature]


def disagreement_text(rank: int, issued: dict[int, Issued]) -> str:
    """Say what a rank issued, and what most of the others that issued something else did."""
    own_signature = call_signature(issued[rank])
    usual_signature = Counter(
        other_signature for each in issued.values() if (other_signature := call_signature(each)) != own_signature
    ).most_common(1)[0][0]
    others = [each for each in sorted(issued) if call_signature(issued[each]) == usual_signature]
    return f"issued {describe_call(issued[rank])} where {_ranks(others)} issued {describe_call(issued[others[0]])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text([*ranks])}"


def find_waited_for(fates: Sequence[RankExit]) -> dict[int, str]:
    """Follow who waits for whom to those that wait for none. If ranks wait for each other, return those that are elsewhere than
    most."""
    waits = {fate.rank: calls_waited_for(fate, fates) for fate in fates}
    final_ranks = {peer for peers in waits.values() for peer in peers if not waits[peer]}
    if final_ranks:
        return {peer: reason_waited_for(peer, fates, waits) for peer in sorted(final_ranks)}
    ring = ranks_in_cycle(waits)
    computing = [fate.rank for fate in fates if fate.rank in ring and is_busy(fate)]
    stuck_in = {rank: next(each for peer, each in waits[rank].items() if peer in ring) for rank in ring}
    ranks_that_left_out = [rank for rank, call in stuck_in.items() if has_left_out(rank, call, waits, fates)]
    places = {rank: (group_key(each), each.op in POINT_TO_POINT) for rank, each in stuck_in.items()}
    elsewhere = ranks_that_left_out or ranks_with_other_names(waits, fates) or minority_of(places)
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, each in stuck_in.items():
        alike[f"{describe_call(each)} named {each.group!r}"].append(rank)
    text = "; ".join(f"{_ranks(ranks)} in {call_text}" for call_text, ranks in alike.items())
    return {rank: f"{IN_A_RING}: {text}" for rank in computing or elsewhere or ring}


def has_left_out(rank: int, here: Issued, waits: dict[int, dict[int, Issued]], fates: Sequence[RankExit]) -> bool:
    """Whether others wait for this rank in what it did not issue, and most ranks issued before the collective that it is in."""
    own = next(fate for fate in fates if fate.rank == rank)
    awaited = [peers[rank] for peers in waits.values() if rank in peers]
    for each in awaited:
        if order_of_issue(own, each, here, fates) is IssueOrder.SECOND_BEFORE:
            orders = Counter(order_of_issue(fate, each, here, fates) for fate in fates)
            if orders[IssueOrder.FIRST_BEFORE] > orders[IssueOrder.SECOND_BEFORE]:
                return True
    return False


def ranks_with_other_names(waits: dict[int, dict[int, Issued]], fates: Sequence[RankExit]) -> list[int]:
    """Return the ranks that named a group, for whose making others wait, unlike most. torch counts groups, so they left one
    out, added one, or made them in another order. If there are several such groups, the one with fewest such ranks counts."""
    awaited = {each.ranks: each for peers in waits.values() for each in peers.values() if each.op in GROUP_CREATION}
    names = (
        {fate.rank: made.group for fate in fates for made in fate.issued if is_same_call(made, each)}
        for _, each in sorted(awaited.items())
    )
    return min(filter(None, map(minority_of, names)), key=len, default=[])


class IssueOrder(Enum):
    """Which of two collectives a rank issued before the other one, or alone."""

    FIRST_BEFORE = "the first one"
    SECOND_BEFORE = "the second one"
    UNKNOWN = "it issued neither, or has no order of these two"


def order_of_issue(fate: RankExit, first: Issued, second: Issued, fates: Sequence[RankExit]) -> IssueOrder:
    """Return which of the two this rank issued before the other one, or alone."""
    both = (first, second)
    others = any(each.op not in GROUP_CREATION and fate not in participants(each, fates) for each in both)
    if others or is_same_call(first, second) or any(each.op in POINT_TO_POINT for each in both):
        return IssueOrder.UNKNOWN
    orders = [next((each.order for each in fate.issued if is_same_call(each, wanted)), 0) for wanted in both]
    has_issued = [bool(order) or has_reached(fate, wanted) for order, wanted in zip(orders, both, strict=True)]
    if not any(has_issued) or (all(has_issued) and not all(orders)):
        return IssueOrder.UNKNOWN
    is_first_before = orders[0] < orders[1] if all(has_issued) else has_issued[0]
    return IssueOrder.FIRST_BEFORE if is_first_before else IssueOrder.SECOND_BEFORE


def is_same_call(first: Issued, second: Issued) -> bool:
    """Whether two ranks issued one and the same: a group that is made may have got another name."""
    if first.op in GROUP_CREATION or second.op in GROUP_CREATION:
        return (first.op, first.ranks) == (second.op, second.ranks)
    return (group_key(first), first.seq) == (group_key(second), second.seq)


def has_reached(fate: RankExit, wanted: Issued) -> bool:
    return (
        has_begun_creation(fate, wanted)
        if wanted.op in GROUP_CREATION
        else last_seq_issued(fate, group_key(wanted)) >= wanted.seq
    )


def reason_waited_for(peer: int, fates: Sequence[RankExit], waits: dict[int, dict[int, Issued]]) -> str:
    waiters = [rank for rank, peers in waits.items() if peer in peers]
    has_exited = any(fate.rank == peer and fate.status == 0 for fate in fates)
    waiters_text = f"rank{'s' * (len(waiters) > 1)} {', '.join(map(str, waiters))} waited for it"
    return f"{'exited while ' * has_exited}{waiters_text} in {describe_call(waits[waiters[0]][peer])}"


def calls_waited_for(fate: RankExit, fates: Sequence[RankExit]) -> dict[int, Issued]:
    """The ranks this one waits for, and in what. One that exited 0 waits for none."""
    if fate.status == 0:
        return {}
    ahead = {
        peer.rank: each for group in groups_with_collectives(fates) for peer, each in peers_behind(fate, group, fates)
    }
    ahead = absent_from_barrier(fate) | unanswered_calls(fate, fates) | ahead | absent_from_creation(fate, fates)
    known_ranks = {fate.rank for fate in fates}
    return {rank: each for rank, each in ahead.items() if rank in known_ranks}


BARRIER_MISSED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


def absent_from_barrier(fate: RankExit) -> dict[int, Issued]:
    """Return the ranks that torch's monitored_barrier named, by their position in the group, as not having come."""
    named = BARRIER_MISSED.search(fate.failure["message"]) if fate.failure else None
    barriers = [each for each in fate.issued if each.op == "barrier"]
    if not named or not barriers:
        return {}
    ranks = barriers[-1].ranks
    positions = [int(number) for number in re.findall(r"\d+", named.group(1))]
    return {ranks[position_in_group]: barriers[-1] for position_in_group in positions if position_in_group < len(ranks)}


def unanswered_calls(fate: RankExit, fates: Sequence[RankExit]) -> dict[int, Issued]:
    """Return, by peer, the first send or receive that the peer has yet to receive or send."""
    unanswered_by_peer: dict[int, Issued] = {}
    for each in fate.issued:
        if each.op in POINT_TO_POINT and each.peer is not None:
            answers = calls_of_peer(fate, each, fates)
            unknown = any(answer.peer is None for answer in answers)  # received from any rank: not known
            if not unknown and max((answer.seq for answer in answers), default=-1) < each.seq:
                unanswered_by_peer.setdefault(each.peer, each)
    return unanswered_by_peer


def absent_from_creation(fate: RankExit, fates: Sequence[RankExit]) -> dict[int, Issued]:
    """Return the ranks that this one waits for in the making of a group, which is the last that it began."""
    making = fate.issued[-1] if fate.issued and fate.issued[-1].op in GROUP_CREATION else None
    if making is None:
        return {}
    return {
        peer.rank: making
        for peer in participants(making, fates)
        if not has_begun_creation(peer, making, time_of_giving_up(fate))
    }


def has_begun_creation(peer: RankExit, making: Issued, until: float = float("inf")) -> bool:
    """Whether a rank had begun to make a group by then. All ranks make groups in one order, or else only their members do. So a
    rank that made later ones may have come, unless it is making one of the same ranks by another name."""
    made_groups = [each for each in peer.issued if each.op in GROUP_CREATION and each.time <= until]
    if any(group_key(each) == group_key(making) for each in made_groups):
        return True
    return any(each.seq > making.seq for each in made_groups) and not is_same_call(made_groups[-1], making)


def peers_behind(fate: RankExit, group: GroupKey, fates: Sequence[RankExit]) -> list[tuple[RankExit, Issued]]:
    """Members of `group` that had yet to issue what this rank issued last in it, when it gave up."""
    last_issued = last_collective_in(fate, group)
    peers = participants(last_issued, fates) if last_issued else []
    return [
        (peer, last_issued)
        for peer in peers
        if last_issued and last_seq_issued(peer, group, time_of_giving_up(fate)) < last_issued.seq
    ]


def time_of_giving_up(fate: RankExit) -> float:
    """When it had waited for as long as it would: what a rank issues after that comes too late."""
    return failure_time(fate) if has_timed_out(fate) else float("inf")


def last_collective_in(fate: RankExit, group: GroupKey) -> Issued | None:
    issued_in_group = (each for each in collectives_of(fate) if group_key(each) == group)
    return max(issued_in_group, key=lambda each: each.seq, default=None)


def last_seq_issued(fate: RankExit, group: GroupKey, until: float = float("inf")) -> int:
    """Return how far it had come in the sequence of a group by then; -1 if it had issued nothing."""
    issued_in_group = [each for each in collectives_of(fate) if group_key(each) == group]
    first = min((each.seq for each in issued_in_group), default=0)
    return max((each.seq for each in issued_in_group if each.time <= until), default=first - 1)


def ranks_in_cycle(waits: dict[int, dict[int, Issued]]) -> list[int]:
    """The ranks that wait for each other: drop, until none is left, ranks for which no remaining one waits."""
    ring = {rank for rank, peers in waits.items() if peers}
    while idle := {rank for rank in ring if not any(rank in waits[other] for other in ring)}:
        ring -= idle
    return sorted(ring)


def describe_call(issued: Issued) -> str:
    """`all_reduce #12 of group [0-3] (step 2, backward, 16.4 KB)`"""
    if issued.op in GROUP_CREATION:
        return f"{issued.op} #{issued.seq} of group {ranks_text(issued.ranks)}"
    peer = "" if issued.peer is None else f" {'to' if issued.op == 'send' else 'from'} rank {issued.peer}"
    root = "" if issued.root is None else f"root {issued.root}"
    payload = size_text(issued.bytes) + f" {issued.dtype}" * bool(issued.bytes and issued.dtype)
    outside = issued.phase == "other"  # a step begins with its first pass: a trainer's own may have begun before
    step = f"step {issued.step}{' or behind it, outside of passes' * outside}" if issued.step > 0 else ""
    step = step or "before the first pass" * (issued.step == 0)
    about = ", ".join(filter(None, [step, issued.phase * (not outside), root, payload]))
    return f"{issued.op} #{issued.seq}{peer} of group {ranks_text(issued.ranks)} ({about})"


def size_text(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
