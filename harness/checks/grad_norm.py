"""The gradient norm that a rank displays is the global norm of the reference's gradients before clipping.

A rank that displays nothing claims nothing; if none does, though its trainer is one that displays norms, that is UNKNOWN.
"""

from __future__ import annotations

import math

from harness.checks import not_applicable, verdict_of
from harness.trial import Finding, Result, Trial

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if trial.ranks and not any("grad_norm" in evidence.displays for evidence in trial.ranks.values()):
        return not_applicable("grad_norm", "this trainer displays none; clipping by it is judged by the law update")
    bounds = trial.bounds
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        shown = step.grad_norm
        if shown is None:
            continue
        examined += 1
        difference = abs(shown / reference.grad_norm - 1) if math.isfinite(shown) else math.inf
        worst = max(worst, difference)
        if not difference <= bounds.grad_norm[step.step]:
            found = f"{shown!r} (ratio {shown / reference.grad_norm:.6g})"
            where = f"rank {rank}, step {step.step}"
            findings.append(Finding(where, repr(reference.grad_norm), found, bounds.text(bounds.grad_norm[step.step])))
    return verdict_of("grad_norm", findings, examined, f"largest difference {worst:.1e}")
