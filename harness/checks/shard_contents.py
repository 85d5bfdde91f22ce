"""Each rank holds, byte for byte, the slice of every seed weight that the plan gives it.

Found by comparing bytes, so no metadata can flatter; the slices of the plan tile a tensor once per replica. A launch that
has resumed before it could be looked at is compared with what was saved.
"""

from __future__ import annotations

from harness.judge.result import Finding, Result, verdict_of
from harness.judge.trial import Trial
from harness.plan.slices import slice_text

STAGE = "structure"


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    for rank, held in sorted(trial.holdings.items()):
        for fqn, wanted in trial.plan.slices[rank].items():
            if fqn not in held:
                continue
            examined += 1
            found = held[fqn]
            if found != wanted:
                shape, flat = trial.plan.shapes[fqn], bool(trial.plan.flat)
                nowhere = "bytes that are nowhere in the seed weight"
                observed = nowhere if found is None else slice_text(found, shape, flat=flat)
                findings.append(Finding.at(rank, slice_text(wanted, shape, flat=flat), observed, name=fqn))
    return verdict_of("shard_contents", findings, examined)
