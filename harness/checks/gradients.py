"""Every rank's gradients, before clipping and before the optimizer, are its slices of the reference's gradients."""

from __future__ import annotations

import numpy as np

from harness import tolerance
from harness.checks import verdict_of
from harness.trial import Finding, Result, Trial, take

STAGE = "numbers"


def check(trial: Trial) -> Result:
    bounds = trial.bounds
    findings, examined = [], 0
    worst: list[float] = [0.0]
    for rank, step, reference in trial.steps():
        for fqn, gradient in step.gradients.items():
            difference = gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
            examined += 1
            worst.append(difference)
            if not difference <= bounds.gradient[step.step]:
                where = f"rank {rank}, step {step.step}, {fqn}"
                found = f"off by {difference:.2e} of the largest entry"
                findings.append(
                    (difference, Finding(where, "the reference's", found, bounds.text(bounds.gradient[step.step])))
                )
    ordered = [finding for _, finding in sorted(findings, key=lambda pair: -pair[0])]
    return verdict_of("gradients", ordered, examined, f"largest difference {max(worst):.1e}")


def gradient_distance(trial: Trial, rank: int, fqn: str, gradient: np.ndarray, full: np.ndarray) -> float:
    part = trial.slice_of(rank, fqn)
    if part is None:
        return float("inf")
    return tolerance.relative_difference(gradient, take(full, part), float(np.max(np.abs(full))))
