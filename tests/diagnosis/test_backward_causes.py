"""Gradients that cannot be compared with the reference's, and what follows of them. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import EMBEDDING, NORM, broken, expect, fsdp_4
from literal import EIGHT, tiny_case, trial_of, with_collectives, with_every_rank, with_step, with_value

from harness.diagnosis.backward import depth, wrong_backward
from harness.diagnosis.hypothesis import Fact
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

W1, WQ = "layers.0.feed_forward.w1.weight", "layers.0.attention.wq.weight"


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


@pytest.mark.parametrize("step", [1, 2])
def test_gradients_of_another_shape_are_told_before_all_else_that_is_wrong_of_a_step(step: int) -> None:
    laws = ("gradients", "grad_norm", "loss", "reported_loss", "update")
    trial = misshapen(fsdp_4(), step, 1, 3)
    text = (
        f"gradients have another shape than their parameters in 1 of 12 parameters ({W1}) on ranks [1,3]: rank 1, {W1}:"
        " gradient (4, 2) of a parameter (2, 4)"
    )
    told = Fact(Cause("gradients misshapen", text), laws)
    assert list(wrong_backward(trial, broken("gradients"))) == [told]
    beside = with_value(trial, 0, step, "gradients", NORM, lambda gradient: gradient * np.nan)
    assert list(wrong_backward(beside, broken("gradients"))) == [told]
    earlier = with_value(trial, 0, step, "gradients", WQ, lambda gradient: gradient + 1)
    assert list(wrong_backward(earlier, broken("gradients"))) == [told], "of what is wrong, those of another shape"


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
    laws = ("gradients", "grad_norm", "loss", "reported_loss", "update")
    trial = with_value(fsdp_4(), 2, step, "gradients", NORM, lambda gradient: gradient * np.nan)
    where = f"NaN or infinite in step {step} in 1 of 12 parameters (norm.weight) on rank 2"
    told = Fact(Cause("not finite", f"gradients are {where}, the losses are finite"), laws)
    assert list(wrong_backward(trial, broken("gradients"))) == [told]
    beside = with_value(trial, 0, step, "gradients", WQ, lambda gradient: gradient + 1)
    assert list(wrong_backward(beside, broken("gradients"))) == [told]
    silent = trial
    for rank in trial.ranks:
        silent = with_step(silent, rank, step, microbatches=())
    assert list(wrong_backward(silent, broken("gradients"))) == [
        Fact(Cause("not finite", f"gradients are {where}"), laws)
    ]
    (part,) = trial.ranks[3].steps[step - 1].microbatches
    earlier = with_step(trial, 3, 2, microbatches=(replace(part, loss_sum=math.nan),))
    assert list(wrong_backward(earlier, broken("gradients")))[0].cause == told.cause
    untold = with_step(trial, 1, step, microbatches=(replace(part, loss_sum=None),))
    assert list(wrong_backward(untold, broken("gradients")))[0].cause == told.cause
    odd = with_step(untold, 3, step, microbatches=(replace(part, loss_sum=math.inf),))
    cause = Cause("not finite", f"loss and gradients are {where}")
    assert list(wrong_backward(odd, broken("gradients")))[0].cause == cause
    labels = trial.reference.labels.copy()
    labels[8 * (step - 1) : 8 * (step - 1) + 2] = -100
    none = replace(trial, reference=replace(trial.reference, labels=labels))
    text = f"{told.cause.observed}: rank 0 has no valid token, and a mean over none is 0/0"
    assert list(wrong_backward(none, broken("gradients")))[0].cause.text == text


def test_nothing_is_told_of_gradients_that_no_law_finds_wrong() -> None:
    wrong = with_value(fsdp_4(), 2, 1, "gradients", NORM, lambda gradient: gradient * np.nan)
    assert list(wrong_backward(wrong, broken("update", "traffic"))) == []
    assert list(wrong_backward(fsdp_4(), broken("gradients", "traffic"))) == []
    assert list(wrong_backward(with_value(wrong, 2, 1, "gradients", NORM, np.nan_to_num), broken("gradients"))) == []


@pytest.mark.parametrize("laws", [("traffic",), ("traffic", "gradients")])
def test_what_is_not_exchanged_over_cp_is_told_where_no_gradient_is_wrong_too(laws: tuple[str, ...]) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), EIGHT))
    silent = with_every_rank(
        trial, lambda t, r: with_collectives(t, r, lambda c: [] if (c.op, c.step) == ("all_to_all", 1) else [c])
    )
    text = "no exchange of K/V gradients over cp: each rank keeps its own"
    (fact,) = wrong_backward(silent, broken(*laws))
    assert (fact.cause, fact.laws) == (Cause("K/V not exchanged", text), ("traffic", "reshard", "features"))
    assert list(wrong_backward(silent, broken("gradients"))) == []
    wrong = with_value(silent, 0, 1, "gradients", NORM, lambda gradient: gradient + 1)
    (fact,) = wrong_backward(wrong, broken("traffic", "gradients"))
    assert fact.laws == ("traffic", "reshard", "features", "gradients", "loss", "reported_loss")
    assert list(wrong_backward(wrong, broken("gradients"))) == []


def test_a_parameter_lies_as_deep_as_forward_comes_to_it() -> None:
    order = ["tok_embeddings", "layers.0.attention_norm", "layers.0.attention.wq", "layers.0.attention.wo"]
    order += ["layers.0.ffn_norm", "layers.0.feed_forward.w1", "layers.0.feed_forward.w2", "layers.1.attention_norm"]
    order += ["layers.11.feed_forward.w2", "norm", "output"]
    depths = [depth(f"{name}.weight") for name in order]
    assert depths == sorted(set(depths))
    assert depth(EMBEDDING) == (-1, 0) and depth(NORM)[0] == math.inf and depth(f"{order[8]}.weight")[0] == 11
    alike = [[depth(f"layers.0.{name}.weight") for name in names] for names in ALIKE]
    assert [len(set(of)) for of in alike] == [1, 1]


ALIKE = [["attention.wq", "attention.wk", "attention.wv"], ["feed_forward.w1", "feed_forward.w3"]]
