"""Parameters of which nothing says where they lie: what each one held before the first step, and after the last on record."""

from __future__ import annotations

from harness.core.evidence.recording import RankRecord

MOST = 1000
"""Parameters that are listed, at most: a summary must be small."""


def unclaimed(record: RankRecord) -> dict[str, tuple[int, int]]:
    """Return by fqn two digests; empty where a wrapper or a DTensor claims something."""
    evidence = record.evidence
    if evidence.structure or any(tensor.mesh is not None for tensor in evidence.parameters):
        return {}
    read = {step.step: step.digests for step in record.steps if step.digests}
    if 0 not in read or len(read) < 2:
        return {}
    first, last = read[0], read[max(read)]
    return {fqn: (first[fqn], last[fqn]) for fqn in sorted({*first} & {*last})[:MOST]}
