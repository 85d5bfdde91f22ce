"""What follows of gradients that are wrong from a step on, and what does not. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosed import NORM
from literal import tiny_case, trial_of, with_step, with_value, without_step

from harness.core.causes.differences import (
    checks_failing_with_gradients,
    distance_to_reference,
    loss_difference,
    observed_gradients,
    pairs_with_wrong_gradient,
    replicas_agree,
)
from harness.core.judge.trial import Trial

WRONG_IN_STEP_2 = with_value(trial_of(tiny_case("ddp_2")), 1, 2, "gradients", NORM, lambda gradient: 2 * gradient)
"""Of one of two replicas: there is no global norm."""


def test_updates_of_replicas_that_disagree_follow_and_all_that_is_computed_later() -> None:
    followed = {"gradients", "grad_norm", "loss", "reported_loss", "update", "replica_agreement"}
    assert set(checks_failing_with_gradients(WRONG_IN_STEP_2, 2)) == followed


@pytest.mark.parametrize(("step", "follows"), [(1, False), (2, True), (3, True)])
def test_updates_follow_only_if_those_of_all_steps_before_are_right(step: int, follows: bool) -> None:
    wrong = with_value(WRONG_IN_STEP_2, 0, step, "parameters", NORM, lambda value: value + 0.01)
    assert ("update" in checks_failing_with_gradients(wrong, 2)) is follows


def test_updates_do_not_follow_where_replicas_agree_for_they_are_judged_by_the_gradients_that_were_seen() -> None:
    both = with_value(WRONG_IN_STEP_2, 0, 2, "gradients", NORM, lambda gradient: 2 * gradient)
    assert "update" not in checks_failing_with_gradients(both, 2)


def with_losses(trial: Trial, number: int, factor: float) -> Trial:
    for rank, step, _ in list(trial.steps_with_reference()):
        parts = tuple(replace(part, loss_sum=factor * (part.loss_sum or 0.0)) for part in step.microbatches)
        trial = with_step(trial, rank, step.step, microbatches=parts) if step.step == number else trial
    return trial


@pytest.mark.parametrize(("step", "follows"), [(1, False), (2, False), (3, True)])
def test_a_loss_that_was_wrong_before_the_gradients_does_not_follow(step: int, follows: bool) -> None:
    found = checks_failing_with_gradients(with_losses(WRONG_IN_STEP_2, step, 2.0), 2)
    assert ("loss" in found) is follows and (follows or "reported_loss" not in found)


def test_a_loss_is_off_by_more_than_its_bound_or_not_at_all() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    bound = trial.bounds.loss[2]
    assert loss_difference(with_losses(trial, 2, 1 + 3 * bound), 2) == pytest.approx(3 * bound, rel=0.2)
    assert loss_difference(with_losses(trial, 2, 1 + 0.5 * bound), 2) is None and loss_difference(trial, 2) is None


def test_a_rank_that_did_not_come_to_a_step_has_no_gradients_of_it() -> None:
    trial = without_step(WRONG_IN_STEP_2, 0, 2)
    assert observed_gradients(trial, 0, 2) == {} and pairs_with_wrong_gradient(trial, 2) == [(1, NORM)]
    assert distance_to_reference(trial, 1, NORM, 2) == pytest.approx(1.0)


@pytest.mark.parametrize(("times", "off", "agree"), [(1.0, 5e-7, True), (1.0, 3e-6, False), (1e-9, 3e-6, False)])
def test_replicas_agree_within_a_millionth_of_each_entry_however_small(times: float, off: float, agree: bool) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    for rank, factor in enumerate((times, times * (1 + off))):
        trial = with_value(trial, rank, 2, "gradients", NORM, lambda gradient, by=factor: by * gradient)
    assert replicas_agree(trial, 2) is agree
