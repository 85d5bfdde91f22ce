"""The gradient norm that a rank displays is the global norm of the reference's gradients before clipping.

A rank that displays nothing claims nothing; if none does, that is UNKNOWN.
"""

from __future__ import annotations

import math

from harness import tolerance
from harness.checks import no_bound, verdict_of
from harness.trial import Finding, Result, Trial

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if not trial.case.exact:
        return no_bound("grad_norm")
    bounds = tolerance.bounds(trial.case, trial.reference).gradient
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        shown = step.grad_norm
        if shown is None:
            continue
        examined += 1
        difference = abs(shown / reference.grad_norm - 1) if math.isfinite(shown) else math.inf
        worst = max(worst, difference)
        if not difference <= bounds[step.step]:
            found = f"{shown!r} (ratio {shown / reference.grad_norm:.6g})"
            where = f"rank {rank}, step {step.step}"
            findings.append(Finding(where, repr(reference.grad_norm), found, f"{bounds[step.step]:.1e}"))
    return verdict_of("grad_norm", findings, examined, f"largest difference {worst:.1e}")
