"""All elements of all seed weights are held by some rank, and no rank starts from anything else."""

from __future__ import annotations

import numpy as np

from harness.judge.contents import take
from harness.judge.result import Finding, Result, verdict_of
from harness.judge.trial import Trial

STAGE = "data"


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    for fqn, full in trial.reference.weights.items():
        covered = np.zeros(full.shape, bool)
        for rank, held in sorted(trial.holdings.items()):
            part = held.get(fqn)
            if fqn in held and part is None:
                findings.append(Finding.at(rank, "a slice of the seed weight", "other values", name=fqn))
            elif part is not None:
                take(covered, part)[...] = True
        examined += 1
        missing = int(covered.size - covered.sum())
        if missing:
            observed = f"{missing} of them held by no rank"
            findings.append(Finding(fqn, f"all {covered.size} elements held by some rank", observed))
    return verdict_of("initial_weights", findings, examined)
