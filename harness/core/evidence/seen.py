"""Questions on all ranks of a run. The evidence of each rank was read, or that of one rank for all of its class."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.core.evidence.records import RankEvidence
    from harness.core.evidence.summary import Summary


class FullyReadRun:
    """The answers for a run of which the evidence of each rank was read."""

    if TYPE_CHECKING:
        world_size: int
        ranks: dict[int, RankEvidence]
        chosen: tuple[int, ...]

    @property
    def started_ranks(self) -> tuple[int, ...]:
        """Return the ranks that were started."""
        return self.chosen or tuple(range(self.world_size))

    @property
    def recorded_ranks(self) -> frozenset[int]:
        """Return the ranks that left evidence, though another one may be read in their place."""
        return frozenset(self.ranks)

    def evidence_for(self, rank: int) -> RankEvidence:
        """Return the evidence of a rank that was seen; ranks that it names may be others'."""
        return self.ranks[rank]

    def groups_on_all(self, chosen: Callable[[RankEvidence], Iterable[tuple[int, ...]]]) -> set[tuple[int, ...]]:
        """Return the groups that are chosen of the evidence of each rank that was seen."""
        groups = set[tuple[int, ...]]()
        for evidence in self.ranks.values():
            groups.update(chosen(evidence))
        return groups

    @functools.cached_property
    def summaries(self) -> Mapping[int, Summary]:
        """Return the summary of each rank that left evidence, with contents as digests."""
        from harness.core.evidence.glance import summary_from_values  # which reads what is defined in records

        return {rank: summary_from_values(evidence) for rank, evidence in self.ranks.items()}
