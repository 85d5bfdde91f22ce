"""All elements of all seed weights are held by some rank, and no rank starts from anything else."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.core.judge.contents import take
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "data"
NEEDS = frozenset({"reference", "values"})


def check(trial: Trial) -> Result:
    findings, examined = [], 0
    for fqn, full in trial.seed_weights.items():
        covered = np.zeros(full.shape, bool)
        for rank, held in sorted(trial.holdings.items()):
            part = held.get(fqn)
            if fqn in held and part is None:
                findings.append(
                    Finding.at(
                        rank, "a slice of the seed weight", "other values", kind="parameter", name=fqn, quantity="value"
                    )
                )
            elif part is not None:
                take(covered, part)[...] = True
        examined += 1
        missing = int(covered.size - covered.sum())
        if missing:
            what: dict[str, Any] = {
                "kind": "parameter",
                "name": fqn,
                "quantity": "held by some rank",
                "unit": "elements",
            }
            findings.append(Finding(**what, expected=covered.size, observed=covered.size - missing))
    return verdict_of("initial_weights", findings, examined)
