"""The loss that every rank displays is the reference's: a claim, judged apart from the training itself."""

from __future__ import annotations

import math

from harness import tolerance
from harness.checks import not_applicable, verdict_of
from harness.trial import Finding, Result, Trial

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if not trial.case.exact:
        return not_applicable("reported_loss", "only float64 cases have a derived bound so far")
    bounds = tolerance.bounds(trial.case, trial.reference).loss
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        examined += 1
        shown = step.reported_loss
        difference = abs(shown - reference.loss) / abs(reference.loss) if shown is not None else math.inf
        worst = max(worst, difference)
        if not difference <= bounds[step.step]:
            found = "nothing" if shown is None else f"{shown!r} (off by {difference:.2e})"
            where = f"rank {rank}, step {step.step}"
            findings.append(Finding(where, repr(reference.loss), found, f"{bounds[step.step]:.1e}"))
    return verdict_of("reported_loss", findings, examined, f"largest difference {worst:.1e}")
