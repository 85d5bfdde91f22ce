"""The loss that a rank displays is the reference's: a claim, judged apart from the training itself.

A rank that displays nothing claims nothing; if none does, that is UNKNOWN.
"""

from __future__ import annotations

import math

from harness.checks import verdict_of
from harness.trial import Finding, Result, Trial

STAGE = "numbers"


def check(trial: Trial) -> Result:
    bounds = trial.bounds
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        shown = step.reported_loss
        if shown is None:
            continue
        examined += 1
        difference = abs(shown - reference.loss) / abs(reference.loss) if math.isfinite(shown) else math.inf
        worst = max(worst, difference)
        if not difference <= bounds.loss[step.step]:
            found = f"{shown!r} (off by {difference:.2e})"
            where = f"rank {rank}, step {step.step}"
            findings.append(Finding(where, repr(reference.loss), found, bounds.text(bounds.loss[step.step])))
    return verdict_of("reported_loss", findings, examined, f"largest difference {worst:.1e}")
