"""What the person who records a job declares of plain tensors: which of them each rank holds a part of."""

from __future__ import annotations

import json

from harness.recording.boxes import Sharded
from harness.recording.place import place_of


def sharded_here(text: str) -> tuple[Sharded, ...]:
    """Return what is declared, for this rank. text: JSON, a list of [pattern, dim, by rank its part, axis]; empty for none."""
    if not text:
        return ()
    rank, _ = place_of()
    found = []
    for pattern, dim, part_of_rank, axis in json.loads(text):
        parts, part = max(part_of_rank) + 1, part_of_rank[rank]
        tp = (
            tuple(range(rank - part, rank - part + parts)) if axis == "tp" and parts > 1 else ()
        )  # of a grid, the last axis
        found.append(Sharded(pattern, dim, parts, part, tp))
    return tuple(found)
