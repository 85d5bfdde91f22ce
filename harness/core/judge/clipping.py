"""Which of the gradients seen clipping was given, where a trainer clips by its own function.

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
from harness.core.judge.contents import take
from harness.core.judge.trial import Trial


def late_steps(trial: Trial) -> set[int]:
    """Return the steps in which clipping was given what the optimizer was given; none without bounds."""
    scaled = {step.step for _, step, _ in trial.steps() if factor(step) not in (None, 1.0)}
    after = dataclasses.replace(trial, run=with_gradients_after(trial.run, scaled))
    try:
        return {s for s in scaled if not matches(trial, s) and (matches(after, s) or matches(after, s, clipped=True))}
    except tolerance.NoBound:
        return set()


def factor(step: StepEvidence) -> float | None:
    """Return the number that multiplied all gradients; None if it was not recorded, or if there was not one number."""
    return None if step.scaled is None or math.isnan(step.scaled) else step.scaled


def with_gradients_after(run: Run, steps: set[int]) -> Run:
    """Return the run with the gradients that the optimizer was given in these steps."""

    def after(step: StepEvidence) -> StepEvidence:
        by = factor(step)
        if step.step not in steps or by is None:
            return step
        return dataclasses.replace(step, gradients={fqn: by * g for fqn, g in step.gradients.items()})

    ranks = {
        rank: dataclasses.replace(evidence, steps=tuple(map(after, evidence.steps)))
        for rank, evidence in run.ranks.items()
    }
    return dataclasses.replace(run, ranks=ranks)


def matches(trial: Trial, number: int, *, clipped: bool = False) -> bool:
    """Whether all gradients of a step are the reference's; clipped: the reference's times its clip coefficient."""
    reference, bound = trial.reference_step(number), trial.bounds.gradient[number]
    by = tolerance.clip_coefficient(reference.grad_norm, trial.case.training.max_norm) if clipped else 1.0
    for rank, step, _ in trial.steps():
        for fqn, gradient in step.gradients.items() if step.step == number else ():
            part = trial.gradient_slice_of(rank, fqn)
            if part is None or fqn not in reference.gradients:
                return False
            full = by * reference.gradients[fqn]
            if not tolerance.relative_difference(gradient, take(full, part), float(abs(full).max())) <= bound:
                return False
    return True


def clipped_unseen(trial: Trial, number: int) -> bool:
    """Whether the gradients were altered after backward, by something not seen, and are the reference's clipped ones."""
    altered = all(s.scaled not in (None, 1.0) for _, s, _ in trial.steps() if s.step == number)
    return altered and not matches(trial, number) and matches(trial, number, clipped=True)
