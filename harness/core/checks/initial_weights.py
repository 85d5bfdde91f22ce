"""All elements of all seed weights are held by some rank, and no rank starts from anything else."""

from __future__ import annotations

from typing import Any

import numpy as np

from harness.core.judge.contents import view_of_slice
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "data"
NEEDS = frozenset({"reference", "values"})


def check(trial: Trial) -> Result:
    """Search each rank's tensors in the seed weights.

    A finding for each that is nowhere, and for each weight with missing elements.
    """
    findings: list[Finding] = []
    examined = 0
    for fqn, full in trial.seed_weights.items():
        covered = np.zeros(full.shape, bool)
        for rank, local_slices in sorted(trial.local_slices.items()):
            local_slice = local_slices.get(fqn)
            if fqn in local_slices and local_slice is None:
                findings.append(
                    Finding.at(
                        rank, "a slice of the seed weight", "other values", kind="parameter", name=fqn, quantity="value"
                    )
                )
            elif local_slice is not None:
                view_of_slice(covered, local_slice)[...] = True
        examined += 1
        missing = int(covered.size - covered.sum())
        if missing:
            subject: dict[str, Any] = {
                "kind": "parameter",
                "name": fqn,
                "quantity": "held by some rank",
                "unit": "elements",
            }
            findings.append(Finding(**subject, expected=covered.size, observed=covered.size - missing))
    return verdict_of("initial_weights", findings, examined)
