"""Causes in which backward passes a multiple of the right gradient on to some modules.

It is then wrong in them, and in all that come before. The place is that of the last parameters that are wrong, whose
gradients are multiples; the checks judge all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np

from harness.core.causes.assume import assume_reference
from harness.core.causes.contributions import SCALED_KIND, TIED_FQN, gradients_are_scaled
from harness.core.causes.differences import (
    expected_gradient,
    first_wrong_step,
    observed_gradients,
    pairs_with_wrong_gradient,
    step_choices,
)
from harness.core.causes.factors import factor_text, times_text
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import shorten_names
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.hypotheses.backward import forward_order
from harness.reference.distance import best_fitting_factor

MULTIPLE_BOUND = 1e-9
"""Relative, in float64: a gradient that is another's multiple is off by no more."""


def multiples_passed_back(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that multiples are passed back to the modules of one layer, or to those with the same names in
    all layers.

    Nothing for inexact cases, if gradients are multiples throughout, or if the last wrong parameters have no common
    factor. A factor other than 0 needs two steps: the second one tests it.
    """
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.has_derived_bounds else None
    if step is None:
        return
    wrong = {fqn for _, fqn in pairs_with_wrong_gradient(trial, step)}
    tied = wrong == {TIED_FQN} and trial.case.model.tied_embeddings
    last_fqns = [
        fqn for fqn in trial.plan.shapes if fqn in wrong and forward_order(fqn) == max(map(forward_order, wrong))
    ]
    factor = 0.0 if tied else _common_factor(trial, step, last_fqns)
    if factor is None or (gradients_are_scaled(trial, step) and not tied):
        return
    name_endings = {fqn.partition(".")[2].partition(".")[2] for fqn in last_fqns} - {""}
    same_modules = [fqn for fqn in trial.plan.shapes if fqn.partition(".")[2].partition(".")[2] in name_endings]
    for fqns in dict.fromkeys((tuple(last_fqns), tuple(same_modules or last_fqns))):
        modules = [fqn.removesuffix(".weight") for fqn in fqns]
        for when, steps, extra_choices in step_choices(trial, step):
            if factor and len(steps) < 2:
                continue  # a second step is the test of a factor that was fitted to the first
            cause = _passed_back_cause(trial, modules, factor, when, steps)
            yield Hypothesis(
                cause, partial(_assume_passed_back, modules=modules, factor=factor, steps=steps), 2 + extra_choices
            )


def _common_factor(trial: Trial, step: int, fqns: Collection[str]) -> float | None:
    """Return the factor by which these parameters' gradients differ from the right ones on all holders.

    None if gradients are no multiple of the right ones, or factors differ.
    """
    factors = []
    for rank, fqn in (pair for pair in pairs_with_wrong_gradient(trial, step) if pair[1] in fqns):
        gradient = observed_gradients(trial, rank, step)[fqn]
        expected = expected_gradient(trial, rank, fqn, step)
        if expected is None or expected.shape != gradient.shape or not np.any(expected):
            return None
        factors.append(best_fitting_factor(gradient, expected))
        if not np.linalg.norm(gradient - factors[-1] * expected) <= MULTIPLE_BOUND * np.linalg.norm(expected):
            return None
    are_same = factors and np.allclose(factors, factors[0], rtol=1e-7, atol=1e-12)
    return float(np.median(factors)) if are_same else None


def _passed_back_cause(trial: Trial, modules: Sequence[str], factor: float, when: str, steps: Sequence[int]) -> Cause:
    """Return the cause: nothing comes back to the outputs of these modules if the factor is 0, else a multiple.
    when: words."""
    outputs_text = f"the outputs of {shorten_names(modules, 4)}{when}"
    details = (("modules", tuple(modules)), ("factor", factor), ("steps", tuple(steps)))
    if abs(factor) < MULTIPLE_BOUND:
        lost_text = f"no gradient comes back to {outputs_text}"
        if {f"{module}.weight" for module in modules} == {TIED_FQN} and trial.case.model.tied_embeddings:
            lost_text = f"the embeddings' part of the tied weight's gradient is missing{when}"  # behind them or in them
        return Cause("lost in backward", lost_text, details=details)
    text = f"gradients that come back to {outputs_text} are {times_text(factor)} what they should be"
    return Cause(SCALED_KIND, text, hint=factor_text(trial, factor, False).removeprefix(": "), details=details)


def _assume_passed_back(trial: Trial, modules: Sequence[str], factor: float, steps: Sequence[int]) -> Trial:
    """Return the trial under the assumption that in these steps the gradients of these modules' outputs are times a factor."""
    from harness.reference.spellings import scale_output_gradients

    return assume_reference(trial, altered=scale_output_gradients(modules, factor, steps))
