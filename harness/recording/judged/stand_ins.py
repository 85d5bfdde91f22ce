"""Representatives of ranks that are alike: one is read and judged for all of them.

Ranks are alike if their records differ only in the groups that they name (`evidence.alike`). Each group must also have
the same relation to the rank and to the layout. So a check that looks at each rank says the same of all of them.
`collective_order` compares ranks; it also gets the ranks whose sequences differ from those of another member of their
group.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping

import numpy as np

from harness.core.case.dims import ParallelDims
from harness.core.checks.collective_order import POINT_TO_POINT, call_text
from harness.core.evidence.keys import ranks_from_key, ranks_key, stable_digest
from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import Collective
from harness.core.evidence.summary import Summary
from harness.core.judge.trial import Trial
from harness.core.plan.kinds import PerRank

Representatives = dict[int, int]
"""Rank -> the one that is read instead; a rank that is read stands for itself."""


def find_representatives(summaries: Mapping[int, Summary], dims: ParallelDims) -> Representatives:
    """Return by rank the one that is read instead: the lowest rank of its class.

    A rank whose class is unknown stands for itself. dims: of as many ranks as the job has; if a rank lies outside of
    it, ranks are classed by their records alone.
    """
    fits_layout = all(rank < dims.world_size for rank in summaries)
    coordinates = np.stack(np.unravel_index(np.arange(dims.world_size), dims.degrees), axis=1)  # [ranks, axes]

    @functools.cache
    def axes_and_distances(key: str) -> tuple[tuple[bool, ...], int]:
        """Return (axes of the layout along which these ranks vary, 0) if they are a whole line or plane of it.

        Else ((), a digest of their distances); a digest of the ranks themselves if some lie outside of the layout.
        """
        ranks = np.array(ranks_from_key(key))
        if not len(ranks) or ranks[-1] >= dims.world_size:
            return (), stable_digest(key)
        varies = (coordinates[ranks] != coordinates[ranks[0]]).any(axis=0)
        whole = len(ranks) == int(np.prod(np.array(dims.degrees)[varies]))
        return (tuple(varies.tolist()), 0) if whole else ((), stable_digest((ranks - ranks[0]).tolist()))

    def position_of_group(rank: int, key: str) -> Hashable:
        """Return where a group lies, seen from the rank: along which axes, and how far away along the others.

        Of a group that is no whole line or plane, a digest of its distances, and how far away its first rank is.
        """
        along, distances = axes_and_distances(key)
        if not along:
            return distances, ranks_from_key(key)[0] - rank if key else 0
        offsets = coordinates[ranks_from_key(key)[0]] - coordinates[rank]
        return along, tuple(int(offset) for offset, inside in zip(offsets, along, strict=True) if not inside)

    firsts: dict[Hashable, int] = {}
    representatives = {}
    for rank, summary in sorted(summaries.items()):
        positions: tuple[Hashable, ...] = ()
        if fits_layout:
            positions = tuple(position_of_group(rank, key) for _, key in summary.rank_class.groups)
        rank_class = summary.rank_class.number or ("unknown", rank)
        representatives[rank] = firsts.setdefault((rank_class, positions), rank)
    return representatives


def split_by_plan(like: Representatives, trial: Trial) -> Representatives:
    """Return representatives so that no rank represents another whose slices the plan cuts to another size.

    They stay as they are if the plan does not derive each rank's slices, as under tp or pp.
    """
    planned = trial.plan.parameter_bytes
    if trial.plan.dims.tp * trial.plan.dims.pp > 1 or trial.plan.flat or not isinstance(planned, PerRank):
        return like
    firsts: dict[Hashable, int] = {}
    split = {}
    for rank, representative in sorted(like.items()):
        split[rank] = firsts.setdefault((representative, planned.kinds.get(rank)), rank)
    return split


# ---- ranks that other members of their groups disagree with


def disagreeing_ranks(
    summaries: Mapping[int, Summary], records: Mapping[int, RankRecord], like: Representatives
) -> set[int]:
    """Return ranks that members of their groups disagree with: one rank of each different sequence of collectives in a
    group.

    Both sides of sends and receives are in it whose bytes do not match. Empty if all agree. records: of the
    representatives.
    """
    orders = {rank: _sequences_and_bytes(record, summaries[rank]) for rank, record in records.items()}
    issued: dict[tuple[str, str], dict[int, int]] = defaultdict(dict)
    sent: dict[tuple[str, str, str], list[int]] = defaultdict(lambda: [0, 0])
    for rank, representative in like.items():
        groups = summaries[rank].rank_class.groups
        sequences, moved = orders[representative]
        for index, digest in sequences.items():
            issued[groups[index]][rank] = digest
        for (index, peer_index, op), size in moved.items():
            ends = (str(rank), groups[peer_index][1])
            source, target = ends if op == "send" else ends[::-1]
            sent[source, target, groups[index][0]][POINT_TO_POINT.index(op)] += size
    ranks: set[int] = set()
    for (source, target, _), (sent_bytes, received_bytes) in sent.items():
        if sent_bytes != received_bytes:
            ranks |= {int(source), int(target)}
    for (_, key), digests in issued.items():
        ranks.update(_first_ranks(key, digests, like))
    return {rank for rank in ranks if rank in like}


def _first_ranks(key: str, digests: Mapping[int, int], like: Representatives) -> Iterable[int]:
    """Return the first rank of each different digest in a group; empty if all its ranks have the same.

    Ranks that `like` does not have are left out. Ranks without a digest count as having the same one.
    """
    firsts: dict[int | None, int] = {}
    for rank in ranks_from_key(key):
        if rank in like:
            firsts.setdefault(digests.get(rank), rank)
    return firsts.values() if len(firsts) > 1 else ()


def _sequences_and_bytes(record: RankRecord, summary: Summary) -> tuple[dict[int, int], Counter[tuple[int, int, str]]]:
    """Return a digest of each group's sequence of collectives, by group; and the bytes by (group, peer, send or
    receive).

    Groups and peers are indices in the summary's groups.
    """
    indices = {group: index for index, group in enumerate(summary.rank_class.groups)}
    calls_of_groups: dict[int, list[Collective]] = defaultdict(list)
    moved: Counter[tuple[int, int, str]] = Counter()
    for call in record.evidence.collectives:
        index = indices[call.group, ranks_key(tuple(sorted(call.ranks)))]
        if call.op not in POINT_TO_POINT:
            calls_of_groups[index].append(call)
        elif call.peer is not None:
            moved[index, indices["", str(call.peer)], call.op] += call.bytes
    sequences = {}
    for index, calls in calls_of_groups.items():
        sequences[index] = stable_digest([call_text(calls, number) for number in range(len(calls))])
    return sequences, moved
