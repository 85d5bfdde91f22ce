"""Each rank holds, byte for byte, the slice of every seed weight that the plan gives it.

Found by comparing bytes, so no metadata can flatter; the slices of the plan tile a tensor once per replica. A launch that
has resumed before it could be looked at is compared with what was saved.
"""

from __future__ import annotations

from typing import Any

from harness.core.judge.finding import Finding, Part
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "structure"
NEEDS = frozenset({"reference", "values"})
NOWHERE = "bytes that are nowhere in the seed weight"


def check(trial: Trial) -> Result:
    """Compare the slice that each rank really holds of each parameter with the planned one.

    A parameter that is not on record is left out; the check `completed` reports it.
    """
    findings: list[Finding] = []
    examined = 0
    for rank, local_slices in sorted(trial.local_slices.items()):
        for fqn, wanted in trial.plan.slices[rank].items():
            if fqn not in local_slices:
                continue
            examined += 1
            local_slice = local_slices[fqn]
            if local_slice != wanted:
                shape = trial.plan.shapes[fqn]
                flat = bool(trial.plan.flat)
                observed = NOWHERE if local_slice is None else Part(local_slice, shape, flat)
                subject: dict[str, Any] = {"kind": "parameter", "name": fqn, "quantity": "slice"}
                findings.append(Finding.at(rank, Part(wanted, shape, flat), observed, **subject))
    return verdict_of("shard_contents", findings, examined)
