"""The loss that a rank displays is the reference's: a claim, judged apart from the training itself.

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
        return no_bound("reported_loss")
    bounds = tolerance.bounds(trial.case, trial.reference).loss
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        shown = step.reported_loss
        if shown is None:
            continue
        examined += 1
        difference = abs(shown - reference.loss) / abs(reference.loss) if math.isfinite(shown) else math.inf
        worst = max(worst, difference)
        if not difference <= bounds[step.step]:
            found = f"{shown!r} (off by {difference:.2e})"
            where = f"rank {rank}, step {step.step}"
            findings.append(Finding(where, repr(reference.loss), found, f"{bounds[step.step]:.1e}"))
    return verdict_of("reported_loss", findings, examined, f"largest difference {worst:.1e}")
