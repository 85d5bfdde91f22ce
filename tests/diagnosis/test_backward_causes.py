"""Gradients that cannot be compared with the reference's, and what follows of them. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import numpy as np
import pytest
from diagnosed import NORM, broken, expect, fsdp_4
from literal import tiny_case, trial_of, with_step, with_value

from harness.diagnosis.backward import depth, wrong_backward
from harness.judge.trial import Trial

W1 = "layers.0.feed_forward.w1.weight"


def misshapen(trial: Trial, step: int, *ranks: int) -> Trial:
    for rank in ranks:
        trial = with_value(trial, rank, step, "gradients", W1, np.transpose)
    return trial


def test_gradients_of_another_shape_are_told_with_the_shapes_on_the_first_rank() -> None:
    expect(
        misshapen(fsdp_4(), 1, 2, 3),
        """\
gradients have another shape than their parameters in 1 of 12 parameters (layers.0.feed_forward.w1.weight) on ranks [2,3]: rank 2, layers.0.feed_forward.w1.weight: gradient (4, 2) of a parameter (2, 4)
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_gradients_of_another_shape_in_a_later_step_leave_the_losses_until_then() -> None:
    (fact,) = wrong_backward(misshapen(fsdp_4(), 2, 1), broken("gradients"))
    assert fact.cause.text.endswith(f"rank 1, {W1}: gradient (4, 2) of a parameter (2, 4)")
    assert fact.laws == ("gradients", "grad_norm", "loss", "reported_loss", "update")


def test_of_zero_a_gradient_has_the_shape_of_what_the_rank_steps() -> None:
    trial = trial_of(tiny_case("fsdp_2", wrapper="zero2"))
    part = trial.plan.gradient_slices[1]
    assert part
    seen = trial.ranks[1].steps[0].gradients
    fqn = next(fqn for fqn, cut in part.items() if trial.plan.slices[1][fqn] != cut and seen[fqn].size)
    wrong = with_value(trial, 1, 1, "gradients", fqn, lambda gradient: gradient[:-1])
    (fact,) = wrong_backward(wrong, broken("gradients"))
    held = seen[fqn].shape
    assert fact.cause.text.endswith(f"gradient {(held[0] - 1, *held[1:])} of a parameter {held}")


@pytest.mark.parametrize("step", [1, 3])
def test_numbers_that_are_not_finite_in_a_step_are_told_with_it(step: int) -> None:
    trial = with_value(fsdp_4(), 2, step, "gradients", NORM, lambda gradient: gradient * np.nan)
    (fact,) = wrong_backward(trial, broken("gradients"))
    told = f"gradients are NaN or infinite in step {step} in 1 of 12 parameters (norm.weight) on rank 2"
    assert fact.cause.text == f"{told}, the losses are finite"
    silent = trial
    for rank in trial.ranks:
        silent = with_step(silent, rank, step, microbatches=())
    (fact,) = wrong_backward(silent, broken("gradients"))
    assert fact.cause.text == told


def test_a_parameter_lies_as_deep_as_forward_comes_to_it() -> None:
    order = ["tok_embeddings", "layers.0.attention_norm", "layers.0.attention.wq", "layers.0.attention.wo"]
    order += ["layers.0.ffn_norm", "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.1.attention_norm"]
    order += ["layers.11.feed_forward.w2", "norm", "output"]
    depths = [depth(f"{name}.weight") for name in order]
    assert depths == sorted(set(depths))
    alike = [[depth(f"layers.0.{name}.weight") for name in names] for names in ALIKE]
    assert [len(set(of)) for of in alike] == [1, 1]


ALIKE = [["attention.wq", "attention.wk", "attention.wv"], ["feed_forward.w1", "feed_forward.w3"]]
