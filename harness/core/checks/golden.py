"""The reference's loss and gradient-norm curves are the ones accepted in golden/.

Fails when model, torch, data or the recipe's meaning changed: reference against golden, not trainer against reference.
"""

from __future__ import annotations

from typing import Any

from harness.core.judge import tolerance
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"reference"})


def check(trial: Trial) -> Result:
    """Compare the reference's curves with the accepted ones, within the recipe's bounds.

    NOT APPLICABLE if the case is in no file. UNKNOWN if no golden could be read. Raises NoBound.
    """
    if not trial.case.file:
        return not_applicable(
            "golden", "the case is in no file (it was given another seed or dtype), so it has no golden"
        )
    if trial.golden is None:
        return Result("golden", Verdict.UNKNOWN, note=trial.golden_problem)
    noise = trial.golden.noise.get(trial.case.golden_noise_key)
    bounds = tolerance.bounds_of_recipe(trial.case, trial.reference, noise, before=trial.steps_before)
    steps = trial.reference.steps
    findings = []
    if len(trial.golden.losses) != len(steps):
        findings.append(Finding(quantity="number of steps", expected=len(trial.golden.losses), observed=len(steps)))
    for step, loss, norm in zip(steps, trial.golden.losses, trial.golden.grad_norms, strict=False):
        for quantity, observed, accepted, bound in (
            ("loss", step.loss, loss, bounds.loss[step.step]),
            ("gradient norm", step.grad_norm, norm, bounds.grad_norm[step.step]),
        ):
            if not abs(observed - accepted) <= bound * abs(accepted):
                subject: dict[str, Any] = {
                    "step": step.step,
                    "quantity": quantity,
                    "note": "expected: the golden, observed: the reference",
                }
                findings.append(
                    Finding(**subject, expected=accepted, observed=observed, bound=bounds.finding_bound(bound))
                )
    return verdict_of("golden", findings, 2 * len(steps))
