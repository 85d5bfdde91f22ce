"""Places at which members of a group issued different collectives, and the ranks whose call is the odd one."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace

from harness.core.blame.calls import Issued, call_signature, describe_call, is_collective
from harness.core.blame.waits import JobCalls, absent_from_barrier
from harness.core.evidence.text import ranks_text


@dataclass(frozen=True)
class DifferentCalls:
    """One place of a group at which its members issued different collectives."""

    members: tuple[int, ...]
    """Global ranks of the group."""
    seq: int
    """Position in the sequence of the group."""
    issued: Mapping[int, Issued]
    """Rank -> the collective that it issued there, of the members that have one on record."""
    unknown_ranks: tuple[int, ...] = ()
    """Members that may have issued one there that is not on record."""

    @property
    def kinds(self) -> list[tuple[Issued, tuple[int, ...]]]:
        """Collectives that were issued there, each with its ranks, ascending; that of the fewest ranks first."""
        ranks_of: dict[Hashable, list[int]] = defaultdict(list)
        for rank, call in sorted(self.issued.items()):
            ranks_of[call_signature(call)].append(rank)
        return [(self.issued[ranks[0]], tuple(ranks)) for ranks in sorted(ranks_of.values(), key=len)]

    @property
    def minority(self) -> list[int]:
        """Ranks that issued something else than most members. All of `issued` if there is no majority, or none that members
        whose call is not on record could not change."""
        signatures = {rank: call_signature(call) for rank, call in self.issued.items()}
        return minority_of(signatures, unknown=len(self.unknown_ranks))


def find_different_calls(job: JobCalls) -> list[DifferentCalls]:
    """Return the first place of each group at which members issued different collectives, in the order of time.

    Sends and receives are left out: the two ends rightly differ.
    """
    calls_by_place: dict[tuple[int, int], dict[int, Issued]] = defaultdict(dict)
    for rank_exit in job.exits:
        for call in filter(is_collective, rank_exit.issued):
            calls_by_place[job.group_number(call), call.seq][rank_exit.rank] = call
    first_of_group: dict[int, DifferentCalls] = {}
    for (group, seq), issued in sorted(calls_by_place.items(), key=lambda place: place[0][1]):
        if group in first_of_group or len(set(map(call_signature, issued.values()))) < 2:
            continue
        call = next(iter(issued.values()))
        unknown = (rank for rank in call.ranks if rank not in issued and _may_have_issued(job, rank, call))
        first_of_group[group] = DifferentCalls(call.ranks, seq, issued, tuple(unknown))
    return sorted(
        first_of_group.values(), key=lambda calls: (max(call.time for call in calls.issued.values()), calls.seq)
    )


def _may_have_issued(job: JobCalls, rank: int, call: Issued) -> bool:
    """Return whether a rank may have issued a collective at the place of a call, though its record has none there."""
    last_seq = job.last_seq(rank, call)
    return last_seq is None or last_seq >= call.seq


def find_disagreeing(job: JobCalls) -> dict[int, str]:
    """Return the minority, with the reason, at the first place in time where members issued different collectives.

    If there is no majority, return the ranks that torch's monitored_barrier named there, or those that differ from what all
    sister groups issued; else all. Empty if no calls differ.
    """
    different_calls = find_different_calls(job)
    if not different_calls:
        return mismatched_sends(job)
    first = different_calls[0]
    minority_ranks = first.minority
    missed: set[int] = set()
    for rank_exit in job.exits:
        for rank, call in absent_from_barrier(rank_exit).items():
            if call == first.issued.get(rank_exit.rank):
                missed.add(rank)
    named_ranks = [rank for rank in minority_ranks if rank in missed] or _unlike_sister_groups(
        first, minority_ranks, job
    )
    return {rank: disagreement_text(rank, first.issued) for rank in named_ranks or minority_ranks}


def _unlike_sister_groups(calls: DifferentCalls, ranks: list[int], job: JobCalls) -> list[int]:
    """Return those of these ranks that issued something else than all sister groups did at that place; empty if these differ.

    Sister groups are the other groups of as many ranks, none of them in this one: the columns of a mesh do the same. So the
    sequences of the others show which side of a group is out of step.
    """
    members = {*calls.members}
    is_sister: dict[int, bool] = {}
    usual = Counter[Hashable]()
    for rank_exit in job.exits:
        for call in filter(is_collective, rank_exit.issued):
            group = job.group_number(call)
            if group not in is_sister:
                is_sister[group] = len(call.ranks) == len(members) and members.isdisjoint(call.ranks)
            if is_sister[group] and call.seq == calls.seq:
                usual[_rootless_signature(call)] += 1
    if len(usual) != 1:
        return []
    unlike = [rank for rank in ranks if _rootless_signature(calls.issued[rank]) not in usual]
    return unlike if len(unlike) < len(calls.issued) else []


def _rootless_signature(call: Issued) -> Hashable:
    """Return a call's signature without its root, which is another rank in each group."""
    return call_signature(replace(call, root=None))


def mismatched_sends(job: JobCalls) -> dict[int, str]:
    """Return both ranks of a send and its receive of different sizes, with the reason: neither side is known to be right.

    Empty if there is none.
    """
    for rank_exit in job.exits:
        for sent in (call for call in rank_exit.issued if call.op == "send"):
            received = next((call for call in job.calls_of_peer(rank_exit.rank, sent) if call.seq == sent.seq), None)
            if received is not None and (received.bytes, received.dtype) != (sent.bytes, sent.dtype):
                issued = {rank_exit.rank: sent, sent.peer: received}
                return {rank: disagreement_text(rank, issued) for rank in issued}  # type: ignore[misc, arg-type]
    return {}


def minority_of(signatures: Mapping[int, Hashable], *, unknown: int = 0) -> list[int]:
    """Return the ranks that differ from most; all of them where two answers are as frequent, [] where all are alike.

    unknown: how many more ranks there are, of which no answer is known: they could make another answer the most frequent one.
    """
    counts = Counter(signatures.values()).most_common()
    if len(counts) < 2:
        return []
    usual_signature = counts[0][0] if counts[0][1] > counts[1][1] + unknown else None
    return [rank for rank, signature in signatures.items() if signature != usual_signature]


def disagreement_text(rank: int, issued: Mapping[int, Issued]) -> str:
    """Return what a rank issued, and what most of the others that issued something else did, as a text."""
    own_signature = call_signature(issued[rank])
    usual_signature = Counter(
        other_signature for call in issued.values() if (other_signature := call_signature(call)) != own_signature
    ).most_common(1)[0][0]
    others = [each for each in sorted(issued) if call_signature(issued[each]) == usual_signature]
    return f"issued {describe_call(issued[rank])} where {name_ranks(others)} issued {describe_call(issued[others[0]])}"


def name_ranks(ranks: Sequence[int]) -> str:
    """Return ranks as a text: `rank 3`, `ranks [0-2]`."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text([*ranks])}"
