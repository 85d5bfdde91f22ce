"""The choice which of the observed gradients were the input of clipping, where a trainer clips by its own function.

Between the end of backward and the optimizer all gradients of a rank were multiplied by one number. It was clipping, or
what a recipe divides by (tokens, a loss scale), or both. The gradients before are taken, unless only those after are the
reference's; `update` judges what was made of those taken. If neither are, they were divided and clipped. If the optimizer
was then given exactly the reference's clipped gradients, what they were before clipping is not known.

This is decided once, when the evidence of a case is complete; the files of ranks then hold what was decided.
"""

from __future__ import annotations

import dataclasses
import math

from harness.core.evidence.records import Run
from harness.core.evidence.step import StepEvidence
from harness.core.judge import tolerance
from harness.core.judge.contents import view_of_slice
from harness.core.judge.trial import Trial


def steps_right_after_scaling(trial: Trial) -> set[int]:
    """Return the steps in which the gradients after the multiplication, and not those before, are the reference's.

    The reference's clipped gradients count as well. Empty if no gradients were multiplied, or if no bounds can be
    given.
    """
    scaled_steps = {
        step.step for _, step, _ in trial.steps_with_reference() if gradient_factor(step) not in (None, 1.0)
    }
    trial_after = dataclasses.replace(trial, run=with_gradients_after(trial.run, scaled_steps))
    late = set()
    try:
        for step in scaled_steps:
            if gradients_match_reference(trial, step):
                continue
            if gradients_match_reference(trial_after, step) or gradients_match_reference(
                trial_after, step, clipped=True
            ):
                late.add(step)
    except tolerance.NoBound:
        return set()
    return late


def gradient_factor(step: StepEvidence) -> float | None:
    """Return the number that multiplied all gradients of a rank after backward.

    None if torch's clipping ran, or if the gradients were not all multiplied by one number.
    """
    return None if step.scaled is None or math.isnan(step.scaled) else step.scaled


def with_gradients_after(run: Run, steps: set[int]) -> Run:
    """Return the run with the gradients of these steps as the optimizer was given them.

    Each is multiplied by its rank's gradient_factor. A rank without one keeps its gradients.
    """

    def after(step: StepEvidence) -> StepEvidence:
        """Return a rank's step with its gradients multiplied, or unchanged if it is not one of `steps`."""
        multiplier = gradient_factor(step)
        if step.step not in steps or multiplier is None:
            return step
        gradients = {fqn: multiplier * gradient for fqn, gradient in step.gradients.items()}
        return dataclasses.replace(step, gradients=gradients)

    ranks = {
        rank: dataclasses.replace(evidence, steps=tuple(map(after, evidence.steps)))
        for rank, evidence in run.ranks.items()
    }
    return dataclasses.replace(run, ranks=ranks)


def gradients_match_reference(trial: Trial, number: int, *, clipped: bool = False) -> bool:
    """Return whether all ranks' gradients of a step are within the bound of the reference's. Raises tolerance.NoBound.

    clipped: compare with the reference's times its clip coefficient. False for a gradient of which the rank should hold
    no slice or the reference has none. True if no rank has the step.
    """
    reference = trial.reference_step(number)
    bound = trial.bounds.gradient[number]
    coefficient = tolerance.clip_coefficient(reference.grad_norm, trial.case.training.max_norm) if clipped else 1.0
    for rank, step, _ in trial.steps_with_reference():
        if step.step != number:
            continue
        for fqn, gradient in step.gradients.items():
            part = trial.gradient_slice_of(rank, fqn)
            if part is None or fqn not in reference.gradients:
                return False
            full = coefficient * reference.gradients[fqn]
            if not tolerance.relative_difference(gradient, view_of_slice(full, part), float(abs(full).max())) <= bound:
                return False
    return True


def only_clipped_gradients_match(trial: Trial, number: int) -> bool:
    """Return whether every rank's gradients were altered after backward, and only as clipped ones are the reference's.

    Their norm before clipping is then not known. Raises tolerance.NoBound.
    """
    altered = all(step.scaled not in (None, 1.0) for _, step, _ in trial.steps_with_reference() if step.step == number)
    return (
        altered
        and not gradients_match_reference(trial, number)
        and gradients_match_reference(trial, number, clipped=True)
    )
