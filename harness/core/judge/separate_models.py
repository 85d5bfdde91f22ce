"""Ranks that begin with the same parameters and train them separately: nothing reduces gradients between them.

It is said where all of it was seen: equal bytes before the first step, other bytes after a later one, and no collective that
joins them. In forward and backward any collective joins. Outside of them, or in another thread, one joins that moves as much
as parameters or gradients may need. A norm and a loss do not.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from harness.core.evidence.keys import ranks_of
from harness.core.evidence.summary import Outside, Summary, Use
from harness.core.judge.local_training import local_by

LEAST = 100  # a hundredth of the bytes of a rank's parameters: gradients may move compressed, and some of them only


@dataclass(frozen=True)
class Separate:
    """Sets of ranks that nothing joins."""

    sets: tuple[tuple[int, ...], ...]
    """Global ranks of each set, which are joined with each other."""
    ranks: tuple[int, ...]
    """Ranks of several sets that held the same before the first step, and not after `step`."""
    step: int
    """Number of the last step that all of them have on record."""
    own: bool = False
    """Whether they have groups that torch has no ranks of, which may join them."""


def separate_models(summaries: Sequence[Summary]) -> Separate | None:
    """None as well if some rank left no step, for it is unknown what it did."""
    sets = _seen_sets(summaries)
    home = {rank: number for number, ranks in enumerate(sets) for rank in ranks}
    for family in (ranks for ranks in _alike_at_first(summaries) if not local_by(ranks)):
        steps = set.intersection(*({step for step in one.contents if step} for one in family))
        last = max(steps, default=0)
        if (
            sets
            and last
            and len({home[one.rank] for one in family}) > 1
            and len({one.contents[last] for one in family}) > 1
        ):
            return Separate(sets, tuple(one.rank for one in family), last, any(one.own_groups for one in summaries))
    return None


def _alike_at_first(summaries: Iterable[Summary]) -> Iterator[list[Summary]]:
    """Ranks whose parts of one model had the same bytes."""
    found: dict[tuple[int, int], list[Summary]] = defaultdict(list)
    for one in summaries:
        if 0 in one.contents:
            found[one.model, one.contents[0]].append(one)
    yield from (family for family in found.values() if len(family) > 1)


def joined_sets(summaries: Sequence[Summary]) -> tuple[tuple[int, ...], ...]:
    """Return the sets of ranks that groups in use connect. There are none if some rank left no step, or has a group whose ranks
    torch does not list."""
    return () if any(one.own_groups for one in summaries) else _seen_sets(summaries)


def _seen_sets(summaries: Sequence[Summary]) -> tuple[tuple[int, ...], ...]:
    """The same as joined_sets, if groups whose ranks torch does not list join no ranks."""
    if any(not one.saw_a_step for one in summaries) or len(summaries) < max(
        (one.world for one in summaries), default=0
    ):
        return ()
    towards = {one.rank: one.rank for one in summaries}

    def end(rank: int) -> int:
        while towards[rank] != rank:
            towards[rank] = towards[towards[rank]]
            rank = towards[rank]
        return rank

    for group in {group for one in summaries for group in _groups(one)}:
        members = [rank for rank in ranks_of(group) if rank in towards]
        for rank in members:
            towards[end(rank)] = end(members[0])
    sets: dict[int, list[int]] = defaultdict(list)
    for rank in sorted(towards):
        sets[end(rank)].append(rank)
    return tuple(sorted(map(tuple, sets.values())))


def _groups(one: Summary) -> Iterator[str]:
    yield from (use.ranks for use in one.uses)
    beside: tuple[Use | Outside, ...] = (*one.outside, *one.background)
    yield from (use.ranks for use in beside if use.bytes * LEAST >= one.memory.get("parameters", 0))
