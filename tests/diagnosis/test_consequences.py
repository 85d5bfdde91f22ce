"""What follows of gradients that are wrong from a step on, and what does not. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM
from literal import tiny_case, trial_of, with_step, with_value

from harness.diagnosis.differences import common_factor, consequences, factor_of, spans

WRONG_IN_STEP_2 = with_value(trial_of(tiny_case("ddp_2")), 1, 2, "gradients", NORM, lambda gradient: 2 * gradient)
"""Of one of two replicas: there is no global norm."""


def test_updates_of_replicas_that_disagree_follow_and_all_that_is_computed_later() -> None:
    followed = {"gradients", "grad_norm", "loss", "reported_loss", "update", "replica_agreement"}
    assert set(consequences(WRONG_IN_STEP_2, 2)) == followed


@pytest.mark.parametrize(("step", "follows"), [(1, False), (2, True), (3, True)])
def test_updates_follow_only_if_those_of_all_steps_before_are_right(step: int, follows: bool) -> None:
    wrong = with_value(WRONG_IN_STEP_2, 0, step, "parameters", NORM, lambda value: value + 0.01)
    assert ("update" in consequences(wrong, 2)) is follows


def test_updates_do_not_follow_where_replicas_agree_for_they_are_judged_by_the_gradients_that_were_seen() -> None:
    both = with_value(WRONG_IN_STEP_2, 0, 2, "gradients", NORM, lambda gradient: 2 * gradient)
    assert "update" not in consequences(both, 2)


def test_a_loss_that_was_wrong_already_does_not_follow() -> None:
    trial = WRONG_IN_STEP_2
    for rank, step, _ in list(trial.steps()):
        parts = tuple(replace(part, loss_sum=2 * (part.loss_sum or 0.0)) for part in step.microbatches)
        trial = with_step(trial, rank, step.step, microbatches=parts) if step.step == 1 else trial
    assert not {"loss", "reported_loss"} & set(consequences(trial, 2))


@pytest.mark.parametrize(
    ("of", "off", "same"), [(1.5, 0.0, True), (1.5, 5e-8, True), (1.5, 3e-7, False), (1e-9, 1.0, False)]
)
def test_a_factor_is_common_to_all_within_a_tenth_of_a_millionth(of: float, off: float, same: bool) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    for rank, factor in enumerate((of, of * (1 + off))):
        trial = with_value(trial, rank, 1, "gradients", NORM, lambda gradient, by=factor: by * gradient)
    found = common_factor(trial, [(0, NORM), (1, NORM)], 1)
    assert found == (pytest.approx(1.5, rel=1e-7) if same else None)


@pytest.mark.parametrize("factor", [1e9 / 3, -1e9 / 3, 1 / 3, 0.0])
def test_a_factor_is_one_relative_to_what_it_makes_of_the_gradient(factor: float) -> None:
    trial = with_value(trial_of(tiny_case("ddp_2")), 0, 1, "gradients", NORM, lambda gradient: factor * gradient)
    assert factor_of(trial, 0, NORM, 1) == pytest.approx(factor, rel=1e-12)
    by_entry = with_value(trial, 0, 1, "gradients", NORM, lambda gradient: gradient * (1 + 1e-8 * np.arange(4)))
    assert (factor_of(by_entry, 0, NORM, 1) is None) is bool(factor)


def test_what_begins_later_is_told_with_the_step_and_the_last_step_has_none_after_it() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    assert [*spans(trial, 1)] == [("", [1, 2, 3], 0), (" in step 1 alone", [1], 1)]
    assert [*spans(trial, 2)] == [(" from step 2 on", [2, 3], 0), (" in step 2 alone", [2], 1)]
    assert [*spans(trial, 3)] == [(" from step 3 on", [3], 0)]
