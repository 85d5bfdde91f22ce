"""Two independent mistakes at once: each is named, if it is needed to explain what is seen. Literal evidence, no ranks."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from diagnosed import LOW_CLIP, first_line, fsdp_4
from literal import tiny_case, trained_otherwise, trial_of, with_every_rank, with_step, with_step_1_gradients
from literal_reference import clip

from harness.checks import judge
from harness.diagnosis.engine import explain
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import Arrays
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

REQUESTED = trial_of(tiny_case("fsdp_2", LOW_CLIP))


# ---- what is needed


def times(factor: float, trial: Trial) -> Trial:
    """As if the gradients of step 1 were so many times those of the reference."""
    first, *later = trial.reference.steps
    gradients = {fqn: factor * gradient for fqn, gradient in first.gradients.items()}
    steps = (replace(first, gradients=gradients, grad_norm=factor * first.grad_norm), *later)
    return replace(trial, reference=replace(trial.reference, steps=steps))


def named(trial: Trial, kind: str = "", **factors: float) -> list[str]:
    """Of suspects that say that gradients are so many times too large. kind: of all; each has one of its own."""

    def propose(trial: Trial, broken: Broken) -> Any:
        return (Hypothesis(Cause(kind or name, name), partial(times, factor)) for name, factor in factors.items())

    found = explain(trial, judge(trial), (propose,), ())
    return [cause_line(one.cause) for proof in found.proofs for one in proof.hypotheses]


def doubled(*, reported: float | None = None) -> Trial:
    """reported: a loss that nobody explains."""
    right = fsdp_4()
    trial = with_step_1_gradients(right, lambda rank, fqn: 2 * right.reference.steps[0].gradients[fqn])
    return (
        trial if reported is None else with_every_rank(trial, lambda t, r: with_step(t, r, 2, reported_loss=reported))
    )


def test_two_that_explain_nothing_alone_are_both_named_where_they_explain_all_together() -> None:
    assert named(doubled(), eight=8.0, quarter=0.25) == ["eight", "quarter"]


def test_two_that_explain_nothing_alone_are_both_named_although_a_check_is_left() -> None:
    assert named(doubled(reported=9.0), eight=8.0, quarter=0.25) == ["eight", "quarter"]


def test_two_factors_of_gradients_are_not_joined_for_the_second_fits_what_the_first_leaves() -> None:
    assert named(doubled(), kind="another feature", eight=8.0, quarter=0.25) == ["eight", "quarter"]
    assert named(doubled(), kind="gradients scaled", eight=8.0, quarter=0.25) == []
    assert named(doubled(), kind="gradients scaled", eight=8.0, twice=2.0) == ["twice"]


def test_two_wrong_reports_are_both_named() -> None:
    trial = fsdp_4()
    for rank, step in itertools.product(trial.ranks, trial.case.steps):
        seen = trial.ranks[rank].steps[step - 1]
        twice = {"reported_loss": 2 * (seen.reported_loss or 0.0), "grad_norm": 3 * (seen.grad_norm or 0.0)}
        trial = with_step(trial, rank, step, **twice)
    assert first_line(trial).count(" is reported ") == 2


def test_one_that_the_other_does_not_need_is_not_named() -> None:
    assert named(doubled(reported=9.0), nothing=1.0, twice=2.0) == ["twice"]


def test_one_that_is_refuted_is_not_named_beside_one_that_explains_a_part() -> None:
    assert named(doubled(reported=9.0), eight=8.0, twice=2.0) == ["twice"]


# ---- two in the optimizer


def test_clipping_left_out_and_another_beta() -> None:
    """The first step tells of clipping alone, the later ones of both."""
    training = replace(LOW_CLIP, max_norm=None, beta2=0.999)
    assert first_line(trained_otherwise(REQUESTED, training=training)) == (
        "gradients are not clipped (coefficient 0.1537); beta2 is 0.999 in the optimizer, requested 0.95"
    )


def test_a_step_left_out_and_each_parameter_clipped_by_its_own_norm() -> None:
    """What one leaves alone the other does not give to the optimizer."""

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        by = {fqn: clip(float(np.linalg.norm(g)), LOW_CLIP) for fqn, g in gradients.items()}
        return {} if step == 2 else {fqn: by[fqn] * g for fqn, g in gradients.items()}

    assert first_line(trained_otherwise(REQUESTED, given=given)) == (
        "the optimizer has no effect in step 2 in every parameter; "
        "gradients are clipped by a norm of each of the parameters, requested one norm of all"
    )
