"""Ranks that are alike: one is read and judged for all of them.

Ranks are alike if their records differ only in the groups that they name (`evidence.alike`). Each group must also have the
same relation to the rank and to the layout. So a check that looks at each rank says the same of all of them. `collective_order`
compares ranks; it also gets the ranks whose sequences differ from those of another member of their group.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from harness.core.case.dims import ParallelDims
from harness.core.checks.collective_order import POINT_TO_POINT, call_text
from harness.core.evidence.keys import number, ranks_key, ranks_of
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import Collective
from harness.core.evidence.summary import Summary
from harness.core.judge.trial import Trial
from harness.core.plan.kinds import PerRank

Like = dict[int, int]
"""Rank -> the one that is read instead; a rank that is read stands for itself."""


def stand_ins(summaries: Mapping[int, Summary], dims: ParallelDims) -> Like:
    """dims: of as many ranks as the job has; if they have not, ranks differ by their records alone."""
    ours = all(rank < dims.world_size for rank in summaries)
    at = np.stack(np.unravel_index(np.arange(dims.world_size), dims.degrees), axis=1)  # [ranks, axes]

    @functools.cache
    def shape(key: str) -> tuple[tuple[bool, ...], int]:
        """Along which axes of the layout these ranks are a whole line, or plane; else their distances."""
        ranks = np.array(ranks_of(key))
        if not len(ranks) or ranks[-1] >= dims.world_size:
            return (), number(key)
        varies = (at[ranks] != at[ranks[0]]).any(axis=0)
        whole = len(ranks) == int(np.prod(np.array(dims.degrees)[varies]))
        return (tuple(varies.tolist()), 0) if whole else ((), number((ranks - ranks[0]).tolist()))

    def stands(rank: int, key: str) -> Hashable:
        """Return where the group lies, seen from the rank."""
        along, distances = shape(key)
        if not along:
            return distances, ranks_of(key)[0] - rank if key else 0
        away = at[ranks_of(key)[0]] - at[rank]
        return along, tuple(int(by) for by, inside in zip(away, along, strict=True) if not inside)

    found: dict[Hashable, int] = {}
    like = {}
    for rank, one in sorted(summaries.items()):
        where = tuple(stands(rank, key) for _, key in one.rank_class.groups) if ours else ()
        like[rank] = found.setdefault((one.rank_class.number or ("unknown", rank), where), rank)
    return like


def apart_by_plan(like: Like, trial: Trial) -> Like:
    """Where the plan cuts their slices to unlike sizes, ranks do not stand for each other."""
    planned = trial.plan.parameter_bytes
    if trial.plan.dims.tp * trial.plan.dims.pp > 1 or trial.plan.flat or not isinstance(planned, PerRank):
        return like
    found: dict[Hashable, int] = {}
    return {rank: found.setdefault((one, planned.kinds.get(rank)), rank) for rank, one in sorted(like.items())}


# ---- ranks that other members of their groups disagree with


def disagreeing(summaries: Mapping[int, Summary], records: Mapping[int, RankRecord], like: Like) -> set[int]:
    """Return one rank of each sequence in a group whose members issued different collectives, and both sides of sends and
    receives that do not match."""
    orders = {rank: _orders(record, summaries[rank]) for rank, record in records.items()}
    issued: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    sent: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for rank, one in like.items():
        places, (sequences, moved) = summaries[rank].rank_class.groups, orders[one]
        for place, digest in sequences.items():
            issued[places[place]][rank] = digest
        for (place, peer, op), size in moved.items():
            ends = (str(rank), places[peer][1])
            source, target = ends if op == "send" else ends[::-1]
            sent[source, target, places[place][0]][POINT_TO_POINT.index(op)] += size
    unmatched = {int(rank) for (*ends, _), (out, back) in sent.items() if out != back for rank in ends}
    odd = {rank for (_, key), digests in issued.items() for rank in _one_of_each(key, digests, like)}
    return {rank for rank in odd | unmatched if rank in like}


def _one_of_each(key: str, digests: Mapping[int, int], like: Like) -> Iterable[int]:
    firsts: dict[int | None, int] = {}
    for rank in ranks_of(key):
        if rank in like:
            firsts.setdefault(digests.get(rank), rank)
    return firsts.values() if len(firsts) > 1 else ()


def _orders(record: RankRecord, summary: Summary) -> tuple[dict[int, int], Counter[tuple[int, int, str]]]:
    """Return, by the places of the summary, each group's sequence, as one number, and the bytes sent and received."""
    places = {place: index for index, place in enumerate(summary.rank_class.groups)}
    sequences: dict[int, list[Collective]] = defaultdict(list)
    moved: Counter[tuple[int, int, str]] = Counter()
    for call in record.evidence.collectives:
        place = places[call.group, ranks_key(tuple(sorted(call.ranks)))]
        if call.op not in POINT_TO_POINT:
            sequences[place].append(call)
        elif call.peer is not None:
            moved[place, places["", str(call.peer)], call.op] += call.bytes
    return {
        place: number([call_text(calls, i) for i in range(len(calls))]) for place, calls in sequences.items()
    }, moved
