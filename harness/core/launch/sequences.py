"""What the ranks of a group issued, in order: who issued something else, and who waits for whom."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum

from harness.core.evidence.records import IN_A_RING
from harness.core.evidence.text import ranks_text
from harness.core.launch.inflight import MAKING, Issued
from harness.core.launch.rank_exit import Fate, busy, moment, timed_out

Place = tuple[str, tuple[int, ...]]  # a group, by name and members: two groups of one split can share a name
EQUAL_BYTES = {"all_reduce", "all_gather", "reduce_scatter", "broadcast", "reduce"}  # every member passes as many
POINT_TO_POINT = {"send": "recv", "recv": "send"}  # and what the other side does


def place(issued: Issued) -> Place:
    return issued.group, issued.ranks


def members(issued: Issued, fates: Sequence[Fate]) -> list[Fate]:
    """Return those who take part: all ranks in init_process_group."""
    return [fate for fate in fates if issued.op == MAKING[0] or fate.rank in issued.ranks]


def collectives(fate: Fate) -> list[Issued]:
    """Without sends and receives, which are counted for each pair of ranks, and without the making of groups."""
    return [each for each in fate.issued if each.op not in POINT_TO_POINT and each.op not in MAKING]


def sequenced(fates: Iterable[Fate]) -> list[Place]:
    """Groups over which collectives ran: their members must issue the same sequence."""
    return list(dict.fromkeys(place(each) for fate in fates for each in collectives(fate)))


def disagreeing(fates: Sequence[Fate]) -> dict[int, str]:
    """Return the minority at the first place, in time, where members issued different collectives. If there is none, return the
    ranks that torch's monitored_barrier named there, or the one that most others wait for; else all."""
    calls_by_position: dict[tuple[Place, int], dict[int, Issued]] = defaultdict(dict)
    for fate in fates:
        for each in collectives(fate):
            calls_by_position[place(each), each.seq][fate.rank] = each
    disagreements = [
        (max(each.time for each in issued.values()), seq, issued)
        for (_, seq), issued in calls_by_position.items()
        if minority({rank: signature(each) for rank, each in issued.items()})
    ]
    if not disagreements:
        return mismatched_sends(fates)
    _, _, issued = min(disagreements, key=lambda each: each[:2])
    minority_ranks = minority({rank: signature(each) for rank, each in issued.items()})
    missed = {rank for fate in fates for rank, each in missed_barrier(fate).items() if each == issued.get(fate.rank)}
    minority_ranks = [rank for rank in minority_ranks if rank in missed] or most_awaited(minority_ranks, fates)
    return {rank: against(rank, issued) for rank in minority_ranks}


def most_awaited(ranks: list[int], fates: Sequence[Fate]) -> list[int]:
    """Return the one of these for which most of the other ranks wait; all of them if there is none."""
    waits_of_others = [waiting(fate, fates) for fate in fates if fate.rank not in ranks]
    counts = Counter(rank for waits in waits_of_others for rank in waits if rank in ranks).most_common()
    has_clear_winner = counts and (len(counts) == 1 or counts[0][1] > counts[1][1])
    return [counts[0][0]] if has_clear_winner else ranks


def mismatched_sends(fates: Sequence[Fate]) -> dict[int, str]:
    """A send and its receive of different sizes: neither side is known to be right."""
    for fate in fates:
        for sent in (each for each in fate.issued if each.op == "send"):
            received = next((each for each in other_side(fate, sent, fates) if each.seq == sent.seq), None)
            if received is not None and (received.bytes, received.dtype) != (sent.bytes, sent.dtype):
                issued = {fate.rank: sent, sent.peer: received}
                return {rank: against(rank, issued) for rank in issued}  # type: ignore[misc, arg-type]
    return {}


def other_side(fate: Fate, issued: Issued, fates: Sequence[Fate]) -> list[Issued]:
    """Return what the peer received of a send by this rank over that group, or the other way round; oldest first."""
    peer = next((peer for peer in fates if peer.rank == issued.peer), None)
    answer = POINT_TO_POINT[issued.op]
    issued_by_peer = peer.issued if peer else ()
    return [
        call
        for call in issued_by_peer
        if call.op == answer and place(call) == place(issued) and call.peer in (fate.rank, None)
    ]


def signature(issued: Issued) -> Hashable:
    """Return what the calls of all members of a group must have in common."""
    has_equal_bytes = issued.op in EQUAL_BYTES or issued.op in POINT_TO_POINT
    return issued.op, issued.root, (issued.bytes, issued.dtype) if has_equal_bytes else None


def minority(signatures: Mapping[int, Hashable]) -> list[int]:
    """Return the ranks that differ from most; all of them where two answers are as frequent, [] where all are alike."""
    counts = Counter(signatures.values()).most_common()
    if len(counts) < 2:
        return []
    usual_signature = counts[0][0] if counts[0][1] > counts[1][1] else None
    return [rank for rank, each in signatures.items() if each != usual_signature]


def against(rank: int, issued: dict[int, Issued]) -> str:
    """Say what a rank issued, and what most of the others that issued something else did."""
    own_signature = signature(issued[rank])
    usual_signature = Counter(
        other_signature for each in issued.values() if (other_signature := signature(each)) != own_signature
    ).most_common(1)[0][0]
    others = [each for each in sorted(issued) if signature(issued[each]) == usual_signature]
    return f"issued {describe(issued[rank])} where {_ranks(others)} issued {describe(issued[others[0]])}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text([*ranks])}"


def waited_for(fates: Sequence[Fate]) -> dict[int, str]:
    """Follow who waits for whom to those that wait for none. If ranks wait for each other, return those that are elsewhere than
    most."""
    waits = {fate.rank: waiting(fate, fates) for fate in fates}
    final_ranks = {peer for peers in waits.values() for peer in peers if not waits[peer]}
    if final_ranks:
        return {peer: why_waited_for(peer, fates, waits) for peer in sorted(final_ranks)}
    ring = cycle(waits)
    computing = [fate.rank for fate in fates if fate.rank in ring and busy(fate)]
    stuck_in = {rank: next(each for peer, each in waits[rank].items() if peer in ring) for rank in ring}
    ranks_that_left_out = [rank for rank, call in stuck_in.items() if left_out(rank, call, waits, fates)]
    places = {rank: (place(each), each.op in POINT_TO_POINT) for rank, each in stuck_in.items()}
    elsewhere = ranks_that_left_out or misnamed(waits, fates) or minority(places)
    alike: dict[str, list[int]] = defaultdict(list)
    for rank, each in stuck_in.items():
        alike[f"{describe(each)} named {each.group!r}"].append(rank)
    text = "; ".join(f"{_ranks(ranks)} in {call_text}" for call_text, ranks in alike.items())
    return {rank: f"{IN_A_RING}: {text}" for rank in computing or elsewhere or ring}


def left_out(rank: int, here: Issued, waits: dict[int, dict[int, Issued]], fates: Sequence[Fate]) -> bool:
    """Whether others wait for this rank in what it did not issue, and most ranks issued before the collective that it is in."""
    own = next(fate for fate in fates if fate.rank == rank)
    awaited = [peers[rank] for peers in waits.values() if rank in peers]
    for each in awaited:
        if order_of_issue(own, each, here, fates) is IssueOrder.SECOND_BEFORE:
            orders = Counter(order_of_issue(fate, each, here, fates) for fate in fates)
            if orders[IssueOrder.FIRST_BEFORE] > orders[IssueOrder.SECOND_BEFORE]:
                return True
    return False


def misnamed(waits: dict[int, dict[int, Issued]], fates: Sequence[Fate]) -> list[int]:
    """Return the ranks that named a group, for whose making others wait, unlike most. torch counts groups, so they left one
    out, added one, or made them in another order. If there are several such groups, the one with fewest such ranks counts."""
    awaited = {each.ranks: each for peers in waits.values() for each in peers.values() if each.op in MAKING}
    names = (
        {fate.rank: made.group for fate in fates for made in fate.issued if same(made, each)}
        for _, each in sorted(awaited.items())
    )
    return min(filter(None, map(minority, names)), key=len, default=[])


class IssueOrder(Enum):
    """Which of two collectives a rank issued before the other one, or alone."""

    FIRST_BEFORE = "the first one"
    SECOND_BEFORE = "the second one"
    UNKNOWN = "it issued neither, or has no order of these two"


def order_of_issue(fate: Fate, first: Issued, second: Issued, fates: Sequence[Fate]) -> IssueOrder:
    """Return which of the two this rank issued before the other one, or alone."""
    both = (first, second)
    others = any(each.op not in MAKING and fate not in members(each, fates) for each in both)
    if others or same(first, second) or any(each.op in POINT_TO_POINT for each in both):
        return IssueOrder.UNKNOWN
    orders = [next((each.order for each in fate.issued if same(each, wanted)), 0) for wanted in both]
    there = [bool(order) or past(fate, wanted) for order, wanted in zip(orders, both, strict=True)]
    if not any(there) or (all(there) and not all(orders)):
        return IssueOrder.UNKNOWN
    is_first_before = orders[0] < orders[1] if all(there) else there[0]
    return IssueOrder.FIRST_BEFORE if is_first_before else IssueOrder.SECOND_BEFORE


def same(first: Issued, second: Issued) -> bool:
    """Whether two ranks issued one and the same: a group that is made may have got another name."""
    if first.op in MAKING or second.op in MAKING:
        return (first.op, first.ranks) == (second.op, second.ranks)
    return (place(first), first.seq) == (place(second), second.seq)


def past(fate: Fate, wanted: Issued) -> bool:
    return has_come(fate, wanted) if wanted.op in MAKING else position(fate, place(wanted)) >= wanted.seq


def why_waited_for(peer: int, fates: Sequence[Fate], waits: dict[int, dict[int, Issued]]) -> str:
    waiters = [rank for rank, peers in waits.items() if peer in peers]
    has_exited = any(fate.rank == peer and fate.status == 0 for fate in fates)
    waiters_text = f"rank{'s' * (len(waiters) > 1)} {', '.join(map(str, waiters))} waited for it"
    return f"{'exited while ' * has_exited}{waiters_text} in {describe(waits[waiters[0]][peer])}"


def waiting(fate: Fate, fates: Sequence[Fate]) -> dict[int, Issued]:
    """The ranks this one waits for, and in what. One that exited 0 waits for none."""
    if fate.status == 0:
        return {}
    ahead = {peer.rank: each for group in sequenced(fates) for peer, each in behind(fate, group, fates)}
    ahead = missed_barrier(fate) | unanswered(fate, fates) | ahead | not_come(fate, fates)
    known_ranks = {fate.rank for fate in fates}
    return {rank: each for rank, each in ahead.items() if rank in known_ranks}


BARRIER_MISSED = re.compile(r"Ranks? ([\d, ]+) failed to pass monitoredBarrier")


def missed_barrier(fate: Fate) -> dict[int, Issued]:
    """Return the ranks that torch's monitored_barrier named, by their position in the group, as not having come."""
    named = BARRIER_MISSED.search(fate.failure["message"]) if fate.failure else None
    barriers = [each for each in fate.issued if each.op == "barrier"]
    if not named or not barriers:
        return {}
    ranks = barriers[-1].ranks
    positions = [int(number) for number in re.findall(r"\d+", named.group(1))]
    return {ranks[position_in_group]: barriers[-1] for position_in_group in positions if position_in_group < len(ranks)}


def unanswered(fate: Fate, fates: Sequence[Fate]) -> dict[int, Issued]:
    """Return, by peer, the first send or receive that the peer has yet to receive or send."""
    unanswered_by_peer: dict[int, Issued] = {}
    for each in fate.issued:
        if each.op in POINT_TO_POINT and each.peer is not None:
            answers = other_side(fate, each, fates)
            unknown = any(answer.peer is None for answer in answers)  # received from any rank: not known
            if not unknown and max((answer.seq for answer in answers), default=-1) < each.seq:
                unanswered_by_peer.setdefault(each.peer, each)
    return unanswered_by_peer


def not_come(fate: Fate, fates: Sequence[Fate]) -> dict[int, Issued]:
    """Return the ranks that this one waits for in the making of a group, which is the last that it began."""
    making = fate.issued[-1] if fate.issued and fate.issued[-1].op in MAKING else None
    if making is None:
        return {}
    return {peer.rank: making for peer in members(making, fates) if not has_come(peer, making, gave_up(fate))}


def has_come(peer: Fate, making: Issued, until: float = float("inf")) -> bool:
    """Whether a rank had begun to make a group by then. All ranks make groups in one order, or else only their members do. So a
    rank that made later ones may have come, unless it is making one of the same ranks by another name."""
    made_groups = [each for each in peer.issued if each.op in MAKING and each.time <= until]
    if any(place(each) == place(making) for each in made_groups):
        return True
    return any(each.seq > making.seq for each in made_groups) and not same(made_groups[-1], making)


def behind(fate: Fate, group: Place, fates: Sequence[Fate]) -> list[tuple[Fate, Issued]]:
    """Members of `group` that had yet to issue what this rank issued last in it, when it gave up."""
    last_issued = last(fate, group)
    peers = members(last_issued, fates) if last_issued else []
    return [
        (peer, last_issued) for peer in peers if last_issued and position(peer, group, gave_up(fate)) < last_issued.seq
    ]


def gave_up(fate: Fate) -> float:
    """When it had waited for as long as it would: what a rank issues after that comes too late."""
    return moment(fate) if timed_out(fate) else float("inf")


def last(fate: Fate, group: Place) -> Issued | None:
    issued_in_group = (each for each in collectives(fate) if place(each) == group)
    return max(issued_in_group, key=lambda each: each.seq, default=None)


def position(fate: Fate, group: Place, until: float = float("inf")) -> int:
    """Return how far it had come in the sequence of a group by then; -1 if it had issued nothing."""
    issued_in_group = [each for each in collectives(fate) if place(each) == group]
    first = min((each.seq for each in issued_in_group), default=0)
    return max((each.seq for each in issued_in_group if each.time <= until), default=first - 1)


def cycle(waits: dict[int, dict[int, Issued]]) -> list[int]:
    """The ranks that wait for each other: drop, until none is left, ranks for which no remaining one waits."""
    ring = {rank for rank, peers in waits.items() if peers}
    while idle := {rank for rank in ring if not any(rank in waits[other] for other in ring)}:
        ring -= idle
    return sorted(ring)


def describe(issued: Issued) -> str:
    """`all_reduce #12 of group [0-3] (step 2, backward, 16.4 KB)`"""
    if issued.op in MAKING:
        return f"{issued.op} #{issued.seq} of group {ranks_text(issued.ranks)}"
    peer = "" if issued.peer is None else f" {'to' if issued.op == 'send' else 'from'} rank {issued.peer}"
    root = "" if issued.root is None else f"root {issued.root}"
    payload = size(issued.bytes) + f" {issued.dtype}" * bool(issued.bytes and issued.dtype)
    outside = issued.phase == "other"  # a step begins with its first pass: a trainer's own may have begun before
    step = f"step {issued.step}{' or behind it, outside of passes' * outside}" if issued.step > 0 else ""
    step = step or "before the first pass" * (issued.step == 0)
    about = ", ".join(filter(None, [step, issued.phase * (not outside), root, payload]))
    return f"{issued.op} #{issued.seq}{peer} of group {ranks_text(issued.ranks)} ({about})"


def size(count: int) -> str:
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
