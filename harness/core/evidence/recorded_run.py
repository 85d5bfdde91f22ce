"""A run that was recorded. Only one record of each class of ranks is read; questions on all ranks are answered for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from harness.core.evidence.keys import ranks_from_key
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.summary import Summary


@dataclass(frozen=True)
class RecordedRun(Run):
    """A recorded run: `ranks` has the evidence of one rank of each class, whose groups are those of that rank."""

    representatives: Mapping[int, int] = field(default_factory=dict)
    """Rank that left a record -> the one that is read instead, or itself."""
    summaries: Mapping[int, Summary] = field(default_factory=dict)
    """Rank that left a record -> its summary."""

    @property
    def recorded_ranks(self) -> frozenset[int]:
        """Return the ranks that left a record, whether or not it is read."""
        return frozenset(self.ranks) | frozenset(self.representatives)

    def evidence_for(self, rank: int) -> RankEvidence:
        """Return the evidence of a rank, or that of the representative of its class. Raises KeyError for a rank without
        a record.
        """
        return self.ranks[rank if rank in self.ranks else self.representatives[rank]]

    def groups_on_all(self, chosen: Callable[[RankEvidence], Iterable[tuple[int, ...]]]) -> set[tuple[int, ...]]:
        """Return the groups that are chosen of each rank's evidence.

        Where a rank's record was not read, these are the groups at the same positions in its summary.
        """
        chosen_by_rank = {rank: set(chosen(evidence)) for rank, evidence in self.ranks.items()}
        groups = set[tuple[int, ...]]().union(*chosen_by_rank.values())
        for rank, representative in self.representatives.items():
            if rank == representative:
                continue
            representative_groups = self.summaries[representative].rank_class.groups
            pairs = zip(representative_groups, self.summaries[rank].rank_class.groups, strict=True)
            for (_, representative_ranks), (_, own_ranks) in pairs:
                if ranks_from_key(representative_ranks) in chosen_by_rank[representative]:
                    groups.add(ranks_from_key(own_ranks))
        return groups
