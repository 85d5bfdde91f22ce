"""What may be asked of all ranks of a run. The evidence of each was read, or one's for all that are alike."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.core.evidence.records import RankEvidence
    from harness.core.evidence.summary import Summary


class AllRead:
    """What was seen of a run if each of its ranks was read."""

    if TYPE_CHECKING:
        world_size: int
        ranks: dict[int, RankEvidence]
        chosen: tuple[int, ...]

    @property
    def started(self) -> tuple[int, ...]:
        return self.chosen or tuple(range(self.world_size))

    @property
    def seen(self) -> frozenset[int]:
        """The ranks that left evidence, though another one may be read in their place."""
        return frozenset(self.ranks)

    def like(self, rank: int) -> RankEvidence:
        """Return the evidence of a rank that was seen; ranks that it names may be others'."""
        return self.ranks[rank]

    def groups_on_all(self, chosen: Callable[[RankEvidence], Iterable[tuple[int, ...]]]) -> set[tuple[int, ...]]:
        """Return the groups that are chosen of the evidence of each rank that was seen."""
        return {group for evidence in self.ranks.values() for group in chosen(evidence)}

    @functools.cached_property
    def summaries(self) -> Mapping[int, Summary]:
        """Each rank that was seen at a glance, with contents as digests."""
        from harness.core.evidence.glance import glance  # which reads what is defined in records

        return {rank: glance(evidence) for rank, evidence in self.ranks.items()}
