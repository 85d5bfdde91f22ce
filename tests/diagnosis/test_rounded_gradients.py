"""Gradients and losses that are off by no more than float32 rounds. Literal evidence, no ranks."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM, broken, fsdp_4, reference_gradient
from literal import ADAMW, tiny_case, with_step, with_value

from harness.diagnosis.backward import rounding
from harness.diagnosis.hypothesis import Fact
from harness.judge.result import Cause
from harness.judge.trial import Trial

ALL = ("gradients", "loss", "grad_norm", "reported_loss")
HINT = "no more than arithmetic in float32 rounds, requested float64"


def off_by(trial: Trial, size: float, *ranks: int, step: int = 1) -> Trial:
    """The gradient of the last norm, on these ranks, relative to the largest entry."""
    largest = np.max(np.abs(reference_gradient(trial, NORM)))
    for rank in ranks:
        trial = with_value(trial, rank, step, "gradients", NORM, lambda gradient: gradient + size * largest)
    return trial


def with_loss(trial: Trial, step: int, factor: float) -> Trial:
    for rank, evidence in trial.ranks.items():
        (part,) = evidence.steps[step - 1].microbatches
        assert part.loss_sum is not None
        trial = with_step(trial, rank, step, microbatches=(replace(part, loss_sum=factor * part.loss_sum),))
    return trial


@pytest.mark.parametrize(
    ("ranks", "where"),
    [
        ((0, 1, 2, 3), "in 1 of 12 parameters (norm.weight)"),
        ((1, 2), "in 1 of 12 parameters (norm.weight) on ranks [1,2]"),
    ],
)
def test_gradients_off_by_the_rounding_of_float32_are_told_with_where_and_how_far(
    ranks: tuple[int, ...], where: str
) -> None:
    rounded = off_by(fsdp_4(), 3e-8, *ranks)
    told = Cause("rounded", "gradients are off by 3e-08", where, hint=HINT)
    assert list(rounding(rounded, broken("gradients"))) == [Fact(told, ALL)]
    more = Cause("rounded", "gradients are off by 9e-07", where, hint=HINT)
    assert list(rounding(off_by(rounded, 9e-7, ranks[-1]), broken("gradients", "loss"))) == [Fact(more, ALL)]
    assert list(rounding(off_by(rounded, 3e-6, ranks[-1]), broken("gradients"))) == []


@pytest.mark.parametrize("step", [1, 2, 3])
def test_losses_of_all_steps_are_off_by_no_more_than_float32_rounds_if_gradients_are_said_to_be_rounded(
    step: int,
) -> None:
    rounded = off_by(fsdp_4(), 3e-8, 0, 1, 2, 3)
    (fact,) = rounding(with_loss(rounded, step, 1 + 2e-7), broken("gradients"))
    assert fact.cause.text == (
        f"gradients are off by 3e-08 in 1 of 12 parameters (norm.weight), the loss by 2e-07: {HINT}"
    )
    for factor in (1 + 2e-6, math.nan):
        assert list(rounding(with_loss(rounded, step, factor), broken("gradients"))) == []


def test_only_gradients_of_the_first_step_that_a_law_of_float64_finds_wrong_are_said_to_be_rounded() -> None:
    rounded = off_by(fsdp_4(), 3e-8, 0, 1, 2, 3)
    assert list(rounding(rounded, broken("loss"))) == []
    assert list(rounding(with_loss(fsdp_4(), 1, 1 + 2e-7), broken("gradients"))) == []
    assert list(rounding(off_by(fsdp_4(), 3e-8, 0, step=2), broken("gradients"))) == []
    assert list(rounding(replace(rounded, case=tiny_case(rounded.case.dims, FLOAT32)), broken("gradients"))) == []


FLOAT32 = replace(ADAMW, dtype="float32")
