"""The gradient norm that every rank displays is the global norm of the reference's gradients before clipping."""

from __future__ import annotations

import math

from harness import tolerance
from harness.checks import not_applicable, verdict_of
from harness.trial import Finding, Result, Trial

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if not trial.case.exact:
        return not_applicable("grad_norm", "only float64 cases have a derived bound so far")
    bounds = tolerance.bounds(trial.case, trial.reference).gradient
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        examined += 1
        shown = step.grad_norm
        difference = abs(shown / reference.grad_norm - 1) if shown is not None else math.inf
        worst = max(worst, difference)
        if not difference <= bounds[step.step]:
            found = "nothing" if shown is None else f"{shown!r} (ratio {shown / reference.grad_norm:.6g})"
            where = f"rank {rank}, step {step.step}"
            findings.append(Finding(where, repr(reference.grad_norm), found, f"{bounds[step.step]:.1e}"))
    return verdict_of("grad_norm", findings, examined, f"largest difference {worst:.1e}")
