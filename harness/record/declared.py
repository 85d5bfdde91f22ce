"""What the person who records a job declares of plain tensors: which of them each rank holds a part of."""

from __future__ import annotations

import json

from harness.record.boxes import Sharded
from harness.record.place import place_of


def sharded_here(text: str) -> tuple[Sharded, ...]:
    """Return what is declared, for this rank. text: JSON, a list of [pattern, dim, by rank its part]; empty for none."""
    if not text:
        return ()
    rank, _ = place_of()
    found = []
    for pattern, dim, part_of_rank in json.loads(text):
        found.append(Sharded(pattern, dim, max(part_of_rank) + 1, part_of_rank[rank]))
    return tuple(found)
