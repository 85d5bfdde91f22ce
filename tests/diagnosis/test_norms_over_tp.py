"""Gradients of norms that tp ranks do not add up. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM, broken, dims, reference_gradient
from literal import TINY, tiny_case, trial_of, with_step, with_value

from harness.diagnosis.backward import _norms_not_summed, wrong_backward
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.hypothesis import Fact
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

WHY = "with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing"
TWO_LAYERS = replace(TINY, n_layers=2)
FIRST = "layers.0.attention_norm.weight"


def with_shares(trial: Trial, step: int, *fqns: str) -> Trial:
    """Of these parameters each tp rank has its share of the gradient of a step."""
    for rank in trial.ranks:
        for fqn in (fqn for fqn in fqns if fqn in trial.ranks[rank].steps[step - 1].gradients):
            whole = trial.reference.steps[step - 1].gradients[fqn]
            part = np.linspace(0.2, 0.7, whole.size).reshape(whole.shape)
            share = whole * (part if trial.plan.group_of(rank, "tp").index(rank) == 0 else 1 - part)
            cut = trial.gradient_slice_of(rank, fqn)
            assert cut is not None
            trial = with_value(trial, rank, step, "gradients", fqn, lambda _, share=share, cut=cut: take(share, cut))
    return trial


def told(trial: Trial, step: int) -> Fact | None:
    return _norms_not_summed(trial, wrong_pairs(trial, step), step)


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (["ffn_norm"], "ffn_norm are not summed over tp: 2 parameters wrong"),
        (["_norm"], "attention_norm and ffn_norm are not summed over tp: 4 parameters wrong"),
        (["norm"], "norm weights are not summed over tp: 5 parameters wrong"),
        (["norm.weight"], "norm weights are not summed over tp: 5 parameters wrong"),
        (["0.ffn_norm"], "layers.0.ffn_norm.weight are not summed over tp: 1 parameter wrong"),
        (
            ["_norm", "-layers.1.ffn_norm"],
            "layers.0.attention_norm.weight, layers.0.ffn_norm.weight, layers.1.attention_norm.weight are not summed over tp:"
            " 3 parameters wrong",
        ),
        (
            ["norm", "-layers.1.ffn_norm"],
            "layers.0.attention_norm.weight, layers.0.ffn_norm.weight, layers.1.attention_norm.weight, norm.weight are not"
            " summed over tp: 4 parameters wrong",
        ),
    ],
)
@pytest.mark.parametrize(("layout", "step"), [(dims(tp=2), 1), (dims(2, tp=2), 2)], ids=str)
def test_norms_whose_shares_are_not_added_up_are_told_with_their_number(
    layout: ParallelDims, names: list[str], shown: str, step: int
) -> None:
    trial = trial_of(tiny_case(layout, model=TWO_LAYERS))
    named, *spared = names
    chosen = [f for f in trial.plan.shapes if named in f and not any(one[1:] in f for one in spared)]
    wrong = with_shares(trial, step, *chosen)
    tested = f"in step {step} what the ranks of a tp group have sums to the reference's gradients; later weights differ"
    fact = told(wrong, step)
    cause = Cause("norms not summed", f"gradients of {shown}, all others right")
    assert fact is not None and (fact.cause, fact.lines) == (cause, (("why", WHY), ("tested", tested)))
    assert fact.checks == ("gradients", "grad_norm", "loss", "reported_loss", "update", "replica_agreement")
    assert list(wrong_backward(wrong, broken("gradients"))) == [fact]


def test_of_more_than_four_norms_the_first_are_named() -> None:
    trial = trial_of(tiny_case("tp_2", model=replace(TINY, n_layers=3)))
    norms = [fqn for fqn in trial.plan.shapes if "norm" in fqn]
    fact = told(with_shares(trial, 1, *norms[:5]), 1)
    assert fact is not None
    assert cause_line(fact.cause) == (
        f"gradients of {', '.join(norms[:4])} and 1 more are not summed over tp: 5 parameters wrong, all others right"
    )


@pytest.mark.parametrize("layout", [dims(2, tp=2), dims(shard=2, tp=2)], ids=str)
def test_shares_that_do_not_sum_to_the_gradient_or_of_other_parameters_are_something_else(layout: ParallelDims) -> None:
    trial = with_shares(trial_of(tiny_case(layout)), 1, NORM, FIRST)
    assert told(trial, 1) is not None
    for fqn in (NORM, FIRST):
        for rank in trial.ranks:
            off = 1e-8 * np.max(np.abs(reference_gradient(trial, fqn)))
            assert told(with_value(trial, rank, 1, "gradients", fqn, lambda g, off=off: g + off), 1) is None
            near = with_value(trial, rank, 1, "gradients", fqn, lambda g, off=off: g + off / 100)
            assert told(near, 1) is not None
    assert told(with_shares(trial, 1, "layers.0.attention.wq.weight"), 1) is None
    other = with_value(trial, 0, 1, "gradients", "tok_embeddings.weight", lambda gradient: 2 * gradient)
    assert told(other, 1) is None
    alone = with_value(trial_of(tiny_case("ddp_2")), 0, 1, "gradients", NORM, lambda gradient: 2 * gradient)
    assert told(alone, 1) is None


def test_of_zero_a_tp_group_that_has_nothing_of_a_norm_is_left_out() -> None:
    trial = with_shares(trial_of(tiny_case("fsdp_2_tp_2", wrapper="zero2")), 1, NORM, FIRST)
    fact = told(trial, 1)
    assert fact is not None
    for rank, evidence in trial.ranks.items():
        held = {fqn: gradient for fqn, gradient in evidence.steps[0].gradients.items() if gradient.size}
        assert (NORM in held) == (rank > 1) and (FIRST in held) == (rank > 1)
        trial = with_step(trial, rank, 1, gradients=held)
    assert told(trial, 1) == fact
