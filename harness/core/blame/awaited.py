"""Ranks that others wait for and that wait for none; of ranks that wait for each other, those that caused it."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from harness.core.blame.calls import (
    GROUP_CREATION,
    POINT_TO_POINT,
    Issued,
    describe_call,
    group_key,
    is_collective,
    is_same_call,
)
from harness.core.blame.divergence import minority_of, name_ranks
from harness.core.blame.rank_exit import RankExit, has_lost_peer, is_busy
from harness.core.blame.waits import JobCalls, has_begun_creation
from harness.core.evidence.records import IN_A_RING

Waits = Mapping[int, Mapping[int, Issued]]
"""Rank -> the ranks that it waits for, each with the call."""


def find_waited_for(job: JobCalls) -> dict[int, str]:
    """Return the ranks that others wait for and that wait for none, with the reason; empty if no rank waits.

    If all of these exited 0 and are most of a group, return the ranks that wait for them.
    If ranks wait for each other, return those that left out a collective, named groups in another way, sent to a wrong peer or
    are elsewhere than most, and all of them if nothing tells.
    """
    waits = job.waits
    awaited: set[int] = set()
    for _, peers in job.ranks_by_waits:
        awaited.update(peers)
    final_ranks = [rank for rank in sorted(awaited) if not waits[rank] and not _waits_unseen(job.by_rank[rank])]
    sends = find_misdirected_sends(job)
    certain = {send.peer: send.rank for send in sends if send.is_certain}
    if went_on := ranks_that_went_on(final_ranks, job):
        return went_on
    if final_ranks:
        busy = {rank for rank in final_ranks if is_busy(job.by_rank[rank])}
        culprits = {rank if rank in busy else certain.get(rank, rank) for rank in final_ranks}
        texts = {send.rank: send.text for send in sends}
        return {
            rank: texts[rank] if rank in certain.values() else reason_waited_for(rank, job) for rank in sorted(culprits)
        }
    ring = ranks_in_cycle(waits)
    sends = [send for send in sends if send.rank in ring and send.peer in ring]
    computing = [rank for rank in ring if is_busy(job.by_rank[rank])]
    stuck_in = {rank: next(call for peer, call in waits[rank].items() if peer in ring) for rank in ring}
    ranks_that_left_out = [rank for rank, call in stuck_in.items() if has_left_out(rank, call, job)]
    places = {rank: (group_key(call), call.op in POINT_TO_POINT) for rank, call in stuck_in.items()}
    elsewhere = ranks_that_left_out or ranks_with_other_names(job) or ranks_of_sends(sends) or minority_of(places)
    ranks_by_text: dict[str, list[int]] = defaultdict(list)
    for rank, call in stuck_in.items():
        ranks_by_text[f"{describe_call(call)} named {call.group!r}"].append(rank)
    text = "; ".join(f"{name_ranks(ranks)} in {call_text}" for call_text, ranks in ranks_by_text.items())
    return {rank: f"{IN_A_RING}: {text}" for rank in computing or elsewhere or ring}


def ranks_that_went_on(final_ranks: Sequence[int], job: JobCalls) -> dict[int, str]:
    """Return the ranks that wait for these, with the reason, if all of these exited 0 and are most of the group: the others
    issued one collective too many. Empty if not, and for sends, receives and the making of groups."""
    if not final_ranks or any(job.by_rank[rank].status != 0 for rank in final_ranks):
        return {}
    reasons: dict[int, str] = {}
    for waiters, peers in job.ranks_by_waits:
        call = next((peers[rank] for rank in final_ranks if rank in peers), None)
        if call is None:
            continue
        wait = job.group_wait(call)
        if not is_collective(call) or len(wait.issued) + len(wait.unknown_ranks) >= len(wait.behind):
            return {}
        for rank in waiters:
            reasons[rank] = f"issued {describe_call(call)} where {name_ranks(wait.behind)} exited with code 0"
    return reasons


@dataclass(frozen=True)
class MisdirectedSend:
    """A send to a peer that receives nothing from this rank, while another one waits to receive from it."""

    rank: int
    """Rank that sends."""
    peer: int
    """Rank that it sends to."""
    is_certain: bool
    """Whether it sends to that peer for the first time, and the rank that waits had received from it before."""
    text: str
    """What was sent and who waits, as a text."""


def find_misdirected_sends(job: JobCalls) -> list[MisdirectedSend]:
    """Return sends to a peer that never received from the rank over the group, while another rank waits to receive from it.

    Either the rank sent to a wrong peer, or the peer left its receive out.
    """
    unanswered = {rank_exit.rank: job.unanswered_calls(rank_exit) for rank_exit in job.exits}
    receives: dict[int, list[tuple[int, Issued]]] = defaultdict(list)
    for rank, calls in unanswered.items():
        for peer, call in calls.items():
            if call.op == "recv":
                receives[peer].append((rank, call))
    sends = []
    for rank, calls in unanswered.items():
        for peer, send in calls.items():
            if send.op != "send" or job.calls_of_peer(rank, send):
                continue
            for waiter, receive in receives[rank]:
                if waiter != peer and group_key(receive) == group_key(send):
                    text = f"issued {describe_call(send)}, which receives nothing from it, while rank {waiter} waits for it in"
                    is_certain = send.seq == 0 and receive.seq > 0
                    sends.append(MisdirectedSend(rank, peer, is_certain, f"{text} {describe_call(receive)}"))
    return sends


def ranks_of_sends(sends: Sequence[MisdirectedSend]) -> list[int]:
    """Return the ranks that sent to a wrong peer, and of sends that are not certain the peers as well."""
    ranks = {send.rank for send in sends} | {send.peer for send in sends if not send.is_certain}
    return sorted(ranks)


def _waits_unseen(rank_exit: RankExit) -> bool:
    """Return whether a rank waited for another though its record does not show for whom.

    It lost a peer, so it was in the last call that it issued, unless it came late. Only times would show that.
    """
    return not rank_exit.is_timed and has_lost_peer(rank_exit)


def has_left_out(rank: int, here: Issued, job: JobCalls) -> bool:
    """Return whether others wait for this rank in what it did not issue, and most ranks issued before the collective `here`,
    which it is in."""
    awaited: dict[int, Issued] = {}  # one object for all ranks that wait in it
    for _, peers in job.ranks_by_waits:
        if rank in peers:
            awaited[id(peers[rank])] = peers[rank]
    for call in awaited.values():
        if order_of_issue(job.by_rank[rank], call, here, job) is IssueOrder.SECOND_BEFORE:
            orders = Counter(order_of_issue(rank_exit, call, here, job) for rank_exit in job.exits)
            if orders[IssueOrder.FIRST_BEFORE] > orders[IssueOrder.SECOND_BEFORE]:
                return True
    return False


def ranks_with_other_names(job: JobCalls) -> list[int]:
    """Return the ranks that named a group, for whose making others wait, unlike most; empty if there is none.

    torch counts groups, so they left one out, added one, or made them in another order. If there are several such groups, the
    one with fewest such ranks counts.
    """
    awaited: dict[tuple[int, ...], Issued] = {}
    for _, peers in job.ranks_by_waits:
        for call in peers.values():
            if call.op in GROUP_CREATION:
                awaited[call.ranks] = call
    names = []
    for _, call in sorted(awaited.items(), key=lambda item: item[0]):
        names_of_call = {}
        for rank_exit in job.exits:
            for made in rank_exit.issued:
                if is_same_call(made, call):
                    names_of_call[rank_exit.rank] = made.group
        names.append(names_of_call)
    return min(filter(None, map(minority_of, names)), key=len, default=[])


class IssueOrder(Enum):
    """Which of two collectives a rank issued before the other one, or alone."""

    FIRST_BEFORE = "the first one"
    SECOND_BEFORE = "the second one"
    UNKNOWN = "it issued neither, or has no order of these two on record"


def order_of_issue(rank_exit: RankExit, first: Issued, second: Issued, job: JobCalls) -> IssueOrder:
    """Return FIRST_BEFORE if this rank issued `first` before `second`, or only `first`; SECOND_BEFORE the other way round.

    UNKNOWN if it issued neither, if it is not on record whether it issued one, or which came first. Also UNKNOWN if both are
    one call, if one is a send or a receive, or if the rank is no member of a collective's group.
    """
    both = (first, second)
    is_no_member = any(call.op not in GROUP_CREATION and rank_exit.rank not in call.ranks for call in both)
    if is_no_member or is_same_call(first, second) or any(call.op in POINT_TO_POINT for call in both):
        return IssueOrder.UNKNOWN
    orders = [_place_of_call(rank_exit, wanted) for wanted in both]
    has_issued = [has_reached(rank_exit, wanted, job) for wanted in both]
    if None in has_issued or not any(has_issued) or (all(has_issued) and not all(orders)):
        return IssueOrder.UNKNOWN
    is_first_before = orders[0] < orders[1] if all(has_issued) else has_issued[0]
    return IssueOrder.FIRST_BEFORE if is_first_before else IssueOrder.SECOND_BEFORE


def _place_of_call(rank_exit: RankExit, wanted: Issued) -> int:
    """Return the position of a call in all that a rank issued, from 1; 0 if it is not on record."""
    for call in rank_exit.issued:
        if is_same_call(call, wanted):
            return call.order
    return 0


def has_reached(rank_exit: RankExit, wanted: Issued, job: JobCalls) -> bool | None:
    """Return whether a rank issued a call, or came as far in its group's sequence; None if that is not known."""
    if _place_of_call(rank_exit, wanted):
        return True
    if wanted.op in GROUP_CREATION:
        return has_begun_creation(rank_exit, wanted)
    last_seq = job.last_seq(rank_exit.rank, wanted)
    return None if last_seq is None else last_seq >= wanted.seq


def reason_waited_for(rank: int, job: JobCalls) -> str:
    """Return who waited for a rank and in which call, as a text. Of more than eight, the first eight ranks are named."""
    waiters = [waiter for waiter, peers in job.waits.items() if rank in peers]
    named = ", ".join(map(str, waiters[:MOST_WAITERS])) + ", .." * (len(waiters) > MOST_WAITERS)
    waiters_text = f"rank{'s' * (len(waiters) > 1)} {named} waited for it"
    has_exited = job.by_rank[rank].status == 0
    return f"{'exited while ' * has_exited}{waiters_text} in {describe_call(job.waits[waiters[0]][rank])}"


MOST_WAITERS = 8


def ranks_in_cycle(waits: Waits) -> list[int]:
    """Return the ranks that wait for each other: drop, until none is left, ranks for which no remaining one waits."""
    ring = {rank for rank, peers in waits.items() if peers}
    while True:
        awaited: set[int] = set()
        for peers in {id(waits[rank]): waits[rank] for rank in ring}.values():
            awaited.update(peers)
        if ring <= awaited:
            return sorted(ring)
        ring &= awaited
