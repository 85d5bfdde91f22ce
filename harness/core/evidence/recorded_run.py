"""A run that was recorded. Only one record of ranks that are alike is read; what is asked of all ranks is answered for all."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from harness.core.evidence.keys import ranks_of
from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.summary import Summary


@dataclass(frozen=True)
class RecordedRun(Run):
    stands: Mapping[int, int] = field(default_factory=dict)
    """Rank that left a record -> the one that is read instead, or itself."""
    summaries: Mapping[int, Summary] = field(default_factory=dict)
    """Rank that left a record -> its summary."""

    @property
    def seen(self) -> frozenset[int]:
        return frozenset(self.ranks) | frozenset(self.stands)

    def like(self, rank: int) -> RankEvidence:
        return self.ranks[rank if rank in self.ranks else self.stands[rank]]

    def groups_on_all(self, chosen: Callable[[RankEvidence], Iterable[tuple[int, ...]]]) -> set[tuple[int, ...]]:
        """Return them: of a rank that was not read those at the same places of its summary."""
        found = {rank: set(chosen(evidence)) for rank, evidence in self.ranks.items()}
        groups = set().union(*found.values())
        for rank, one in self.stands.items():
            if rank != one:
                named = zip(self.summaries[one].places, self.summaries[rank].places, strict=True)
                groups |= {ranks_of(theirs) for (_, ours), (_, theirs) in named if ranks_of(ours) in found[one]}
        return groups
