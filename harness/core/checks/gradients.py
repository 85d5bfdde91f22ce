"""Every rank's gradients, before clipping and before the optimizer, are its slices of the reference's gradients.

Each entry is judged, relative to its parameter's largest. In recipes with noise each parameter's whole gradient is judged
in addition: by its best-fitting factor and its distance, which are far sharper (harness/core/judge/tolerance.py).
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from harness.core.judge import tolerance
from harness.core.judge.assembly import Misfit, gradient_distance, gradient_misfits
from harness.core.judge.clipping import only_clipped_gradients_match, steps_right_after_scaling
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
OF_GRADIENTS = True
UNDECIDED_TEXT = (
    "step {}: which gradients clipping was given was not decided, for no bound was known then; run the case again"
)


def check(trial: Trial) -> Result:
    """Compare each entry of the gradients with the reference's, and in recipes with noise each whole gradient.

    Raises NoBound. UNKNOWN if it was not decided which gradients clipping was given. UNKNOWN as well if gradients
    before clipping were not observed, or slices make up no whole gradient, and nothing else is wrong. Frozen parameters
    are left out. Findings come with the largest difference first.
    """
    bounds = trial.bounds
    if unsettled := steps_right_after_scaling(trial):
        return Result("gradients", Verdict.UNKNOWN, note=UNDECIDED_TEXT.format(min(unsettled)))
    findings: list[tuple[int, float, Finding]] = []
    worst: list[float] = [0.0]
    for rank, step, reference in trial.steps_with_reference():
        for fqn, gradient in step.gradients.items():
            if fqn not in reference.gradients:  # it is frozen, which `completed` says
                continue
            difference = gradient_distance(trial, rank, fqn, gradient, reference.gradients[fqn])
            worst.append(difference)
            if not difference <= bounds.gradient[step.step]:
                subject: dict[str, Any] = {"step": step.step, "kind": "parameter", "name": fqn, "quantity": "gradient"}
                measure: dict[str, Any] = {
                    "unit": "of the largest entry",
                    "bound": bounds.finding_bound(bounds.gradient[step.step]),
                }
                finding = Finding.at(rank, "the reference's", difference, **subject, **measure)
                findings.append((step.step, difference, finding))
    steps_with_findings = {step for step, _, _ in findings}
    unseen = {step for step in steps_with_findings if only_clipped_gradients_match(trial, step)}
    judged = [entry for entry in findings if entry[0] not in unseen]
    ordered = [finding for _, _, finding in sorted(judged, key=lambda entry: -entry[1])]
    whole_misfits, lacking = ([], "") if trial.case.has_derived_bounds else _whole_gradient_misfits(trial)
    ordered += [_misfit_finding(trial, misfit) for misfit in whole_misfits if not misfit.is_within_bound]
    if (lacking or unseen) and not ordered:
        return Result("gradients", Verdict.UNKNOWN, len(worst) - 1, note=lacking or _remedy_text(min(unseen)))
    return verdict_of("gradients", ordered, len(worst) - 1 + len(whole_misfits), largest=max(worst))


def _remedy_text(step: int) -> str:
    """Return a text of why gradients of a step cannot be judged, with the call that the adapter needs."""
    text = f"step {step}: the optimizer received the reference's clipped gradients; gradients were not observed before clipping"
    return f"{text}; call `harness.adapter.note_gradients()` in the adapter just before the trainer clips"


def _whole_gradient_misfits(trial: Trial) -> tuple[list[Misfit], str]:
    """Return (the misfit of each whole gradient of all steps, the worst first; a text of the first without one).

    The text is empty if every parameter has whole gradients. A misfit with a NaN comes first.
    """
    all_misfits: list[Misfit] = []
    problem = ""
    for step in trial.case.steps:
        misfits_of_step, lacking = gradient_misfits(trial, step)
        all_misfits += misfits_of_step
        if lacking and not problem:
            problem = f"step {step}, {lacking[0]}: the slices that ranks hold do not make up one whole gradient"
    return sorted(all_misfits, key=lambda misfit: -np.nan_to_num(misfit.ratio_to_bound, nan=np.inf)), problem


def _misfit_finding(trial: Trial, misfit: Misfit) -> Finding:
    """Return the finding of a whole gradient: about its factor if only that is wrong, otherwise its distance."""
    subject: dict[str, Any] = {"step": misfit.step, "kind": "parameter", "name": misfit.fqn, "quantity": "gradient"}
    finding_of = partial(Finding, ranks=misfit.ranks, expected="the reference's", **subject)
    if misfit.is_only_scaled:
        bound = trial.bounds.finding_bound(misfit.scale_bound, tolerance.FIT_FACTOR)
        return finding_of(observed=misfit.scale, unit="times the reference by best fit", bound=bound)
    bound = trial.bounds.finding_bound(misfit.distance_bound, tolerance.distance_factor(trial.case, misfit.step))
    return finding_of(observed=misfit.distance, unit="of its norm", bound=bound)
