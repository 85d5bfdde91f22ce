"""Ranks that begin with the same parameters and train them separately: nothing reduces gradients between them.

It is reported where all of it was observed: equal bytes before the first step, other bytes after a later one, and no
collective that joins the ranks. In forward and backward any collective joins them. Outside of these phases, or in
another thread, a collective joins them if it moves as many bytes as parameters or gradients may need. A norm and a loss
do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.core.evidence.keys import ranks_from_key
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Outside, Use
from harness.core.judge.local_training import local_training_means

SMALLEST_JOINING_SHARE = (
    100  # a hundredth of the bytes of a rank's parameters: gradients may move compressed, and some of them only
)


@dataclass(frozen=True)
class SeparateModels:
    """Sets of ranks that no collective joins, though ranks of several sets began with the same parameters."""

    sets: tuple[tuple[int, ...], ...]
    """Global ranks of each set, which are joined with each other."""
    ranks: tuple[int, ...]
    """Ranks of several sets that held the same before the first step, and not after `step`."""
    step: int
    """Number of the last step that all of them have on record."""
    own: bool = False
    """Whether they have groups that torch has no ranks of, which may join them."""


def find_separate_models(summaries: Sequence[Summary]) -> SeparateModels | None:
    """Return the first family of ranks that begin with equal parameters and train them separately.

    None if there is none. Families that train locally by request are left out. None as well if some rank recorded no
    step, because it is unknown what it did.
    """
    sets = _sets_by_known_groups(summaries)
    set_of_rank: dict[int, int] = {}
    for number, ranks in enumerate(sets):
        for rank in ranks:
            set_of_rank[rank] = number
    for family in _families_equal_at_first(summaries):
        if local_training_means(family):
            continue
        common_steps = set.intersection(*(set(summary.contents.by_step) - {0} for summary in family))
        last_step = max(common_steps, default=0)
        if not sets or not last_step:
            continue
        sets_of_family = {set_of_rank[summary.rank] for summary in family}
        if len(sets_of_family) > 1 and len({summary.contents.by_step[last_step] for summary in family}) > 1:
            ranks = tuple(summary.rank for summary in family)
            return SeparateModels(sets, ranks, last_step, any(summary.groups.own for summary in summaries))
    return None


def _families_equal_at_first(summaries: Iterable[Summary]) -> Iterator[list[Summary]]:
    """Yield the families of two or more ranks whose parameters of one model had equal digests before the first step."""
    families: dict[tuple[int, int], list[Summary]] = defaultdict(list)
    for summary in summaries:
        if 0 in summary.contents.by_step:
            families[summary.parameters.model, summary.contents.by_step[0]].append(summary)
    yield from (family for family in families.values() if len(family) > 1)


def connected_rank_sets(summaries: Sequence[Summary]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that groups in use connect, directly or through others.

    Empty if some rank recorded no step, or has a group whose ranks torch does not list.
    """
    if any(summary.groups.own for summary in summaries):
        return ()
    return _sets_by_known_groups(summaries)


def _sets_by_known_groups(summaries: Sequence[Summary]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that groups in use connect, each ascending.

    Groups whose ranks torch does not list connect none. Empty if some rank recorded no step, or left no summary.
    """
    world_size = max((summary.world for summary in summaries), default=0)
    if any(not summary.saw_a_step for summary in summaries) or len(summaries) < world_size:
        return ()
    # A forest over ranks (union-find): ranks of one set have the same root.
    parent = {summary.rank: summary.rank for summary in summaries}

    def root_of(rank: int) -> int:
        """Return the root of the set that has this rank. Paths to it are shortened on the way."""
        while parent[rank] != rank:
            parent[rank] = parent[parent[rank]]
            rank = parent[rank]
        return rank

    groups: set[str] = set()
    for summary in summaries:
        groups.update(_joining_groups(summary))
    for group in groups:
        members = [rank for rank in ranks_from_key(group) if rank in parent]
        for rank in members:
            parent[root_of(rank)] = root_of(members[0])
    sets: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(parent):
        sets[root_of(rank)].append(rank)
    return tuple(sorted(map(tuple, sets.values())))


def _joining_groups(summary: Summary) -> Iterator[str]:
    """Yield the groups that join their ranks, in the words of ranks_key; one may come several times.

    A group joins if it was used in forward or backward, or if enough bytes moved over it elsewhere.
    """
    yield from (use.ranks for use in summary.traffic.uses)
    other_uses: tuple[Use | Outside, ...] = (*summary.traffic.outside, *summary.traffic.background)
    yield from (
        use.ranks
        for use in other_uses
        if use.bytes * SMALLEST_JOINING_SHARE >= summary.resources.memory.get("parameters", 0)
    )
