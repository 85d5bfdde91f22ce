"""Gradients and losses that neither a factor nor a mix of samples explains: forward, backward, a later step. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    DDP_2,
    EMBEDDING,
    LAST,
    NORM,
    dims,
    expect,
    expect_first,
    fsdp_4,
    gradients_of,
    reference_gradient,
    scaled,
)
from literal import (
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_step,
    with_step_1_gradients,
    with_updates_that_follow,
    with_value,
)

from harness.diagnosis.backward import _lost_before, depth
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.hypothesis import NOT_TESTED, Fact
from harness.judge.result import Cause, Verdict
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

# ---- gradients


def test_gradients_that_are_nan_on_one_rank() -> None:
    trial = fsdp_4()
    expect(
        with_value(trial, 2, 1, "gradients", NORM, lambda g: g * np.nan),
        """\
gradients are NaN or infinite in step 1 in 1 of 12 parameters (norm.weight) on rank 2, the losses are finite
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_losses_and_gradients_that_are_nan() -> None:
    trial = scaled(dims(1, 4), math.nan)
    for rank in trial.ranks:
        batch = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=math.nan),))
    expect_first(trial, """loss and gradients are NaN or infinite in step 1 in every parameter""")


def jolted(trial: Trial, size: float, *fqns: str) -> Trial:
    """Gradients off by some noise, relative to the largest entry."""
    draw = np.random.default_rng(1)

    def noisy(_: int, fqn: str) -> np.ndarray:
        full = reference_gradient(trial, fqn)
        return full + (size * np.max(np.abs(full)) * noise[fqn] if not fqns or fqn in fqns else 0.0)

    noise = {fqn: draw.uniform(-1, 1, shape) for fqn, shape in trial.plan.shapes.items()}
    return with_step_1_gradients(trial, noisy)


def test_gradients_wrong_in_some_parameters_by_no_factor() -> None:
    expect(
        jolted(fsdp_4(), 0.3, NORM, EMBEDDING),
        """\
gradients are wrong by up to 3e-01 of the largest entry in 2 of 12 parameters (tok_embeddings.weight, norm.weight); the loss of step 1 matches within 1e-14
  grad_norm: rank 0, step 1, gradient norm: expected 1.6264655801234829, observed 1.6401477663912865 (ratio 1.00841; bound 2.5e-14)
  gradients: rank 2, step 1, gradient of tok_embeddings.weight: expected the reference's, observed off by 2.88e-01 of the largest entry (bound 2.5e-14)
  also failing: gradients
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_gradients_off_by_the_rounding_of_float32() -> None:
    expect_first(
        jolted(fsdp_4(), 3e-8),
        """gradients are off by 3e-08 in every parameter: no more than arithmetic in float32 rounds, requested float64""",
    )


def test_a_wrong_forward_pass() -> None:
    trial = jolted(fsdp_4(), 0.3)
    for rank in trial.ranks:
        batch = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=1.01 * batch.loss_sum),))
    expect_first(
        trial,
        """the forward pass is wrong: the loss of step 1 is off by 1.0e-02 though weights and samples are right""",
    )


def test_tp_peers_that_compute_different_losses() -> None:
    trial = trial_of(tiny_case("tp_2"))
    batch = trial.ranks[1].steps[0].microbatches[0]
    trial = with_step(trial, 1, 1, microbatches=(replace(batch, loss_sum=1.01 * batch.loss_sum),))
    expect_first(
        trial,
        """loss: rank 1, step 1, loss: expected 40.55373275024224, observed 40.95927007774466 (expected: tp peer 0's, same tokens; bound 1.4e-14)""",
    )


def test_gradients_that_go_wrong_later_by_no_factor() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 0, 3, "gradients", NORM, lambda g: g + 0.1)
    expect_first(
        with_updates_that_follow(trial),
        """gradients are right in step 1 and wrong in step 3 in 1 of 12 parameters (norm.weight) on rank 0; the loss of step 3 matches within 2e-14""",
    )


def test_a_forward_pass_that_goes_wrong_later() -> None:
    trial = fsdp_4()
    for rank, evidence in trial.ranks.items():
        batches = tuple(replace(batch, loss_sum=1.01 * batch.loss_sum) for batch in evidence.steps[1].microbatches)
        wrong = {fqn: gradient**2 for fqn, gradient in evidence.steps[1].gradients.items()}
        trial = with_step(trial, rank, 2, gradients=wrong, microbatches=batches)
    expect_first(
        with_updates_that_follow(trial),
        """the forward pass is right in step 1 and wrong in step 2: the loss of step 2 is off by 1.0e-02""",
    )


@pytest.mark.parametrize(
    ("right", "shown"),
    [
        (("w2",), "layers.0.feed_forward.w2.weight and what follows"),
        (("w2", "w1", "w3"), "layers.0.feed_forward.w1.weight, layers.0.feed_forward.w3.weight and what follows"),
        (("w2", "w1", "w3", "ffn_norm"), "layers.0.ffn_norm.weight and what follows"),
        (("w2", "w1", "w3", "ffn_norm", "wo"), "layers.0.attention.wo.weight and what follows"),
        (
            ("w2", "w1", "w3", "ffn_norm", "wo", "wq", "wk", "wv"),
            "layers.0.attention.wq.weight, layers.0.attention.wk.weight and 1 more and what follows",
        ),
        (
            ("w2", "w1", "w3", "ffn_norm", "wo", "wq", "wk", "wv", "attention_norm"),
            "layers.0.attention_norm.weight and what follows",
        ),
    ],
)
def test_where_backward_loses_something_is_told_by_the_place_in_the_block(right: tuple[str, ...], shown: str) -> None:
    trial = trial_of(tiny_case("tp_2"))
    wrong = [fqn for fqn in trial.plan.shapes if fqn.split(".")[-2] not in (*right, "norm", "output")]
    text = f"gradients are right in {shown}, and wrong in all parameters before: backward goes wrong there"
    checks = ("traffic", "gradients", "grad_norm", "loss", "reported_loss")
    assert _lost_before(trial, [(0, fqn) for fqn in wrong], 1) == Fact(
        Cause("lost in backward", text), checks, NOT_TESTED
    )


def test_what_is_wrong_on_both_sides_of_something_right_was_not_lost_on_the_way() -> None:
    trial = trial_of(tiny_case("tp_2"))
    assert _lost_before(trial, [(0, "tok_embeddings.weight"), (0, NORM)], 1) is None
    assert _lost_before(trial, [(0, fqn) for fqn in trial.plan.shapes], 1) is None
    beside = [(0, fqn) for fqn in trial.plan.shapes if depth(fqn) < depth("layers.0.attention.wo.weight")]
    assert _lost_before(trial, beside, 1) is not None
    for right in ("attention_norm", "wv"):
        assert _lost_before(trial, [pair for pair in beside if right not in pair[1]], 1) is None


def test_gradients_of_a_step_whose_loss_is_wrong_were_not_lost_in_backward() -> None:
    trial = trial_of(tiny_case("tp_2"))
    wrong = [(0, fqn) for fqn in trial.plan.shapes if fqn != LAST]
    (batch,) = trial.ranks[0].steps[1].microbatches
    for step in (1, 2):
        assert _lost_before(trial, wrong, step) is not None
    dear = with_step(trial, 0, 2, microbatches=(replace(batch, loss_sum=1.01 * batch.loss_sum),))
    assert _lost_before(dear, wrong, 1) is not None and _lost_before(dear, wrong, 2) is None


# ---- what is reported, and the way to right numbers


# ---- gradients


def test_gradients_that_are_lost_before_the_output() -> None:
    trial = trial_of(tiny_case("tp_2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + 0.1 * noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    wrong |= {LAST: reference_gradient(trial, LAST)}
    expect_first(
        with_step_1_gradients(trial, lambda _, fqn: wrong[fqn]),
        """gradients are right in output.weight, and wrong in all parameters before: backward goes wrong there""",
    )


def test_gradients_that_are_lost_in_a_feed_forward_whose_sum_is_not_there() -> None:
    trial = trial_of(tiny_case("tp_2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + 0.1 * noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    for fqn in (LAST, "norm.weight", *(f"layers.0.feed_forward.w{n}.weight" for n in (1, 2, 3))):
        wrong[fqn] = reference_gradient(trial, fqn)
    trial = with_step_1_gradients(trial, lambda _, fqn: wrong[fqn])
    silent = with_every_rank(
        trial,
        lambda t, r: with_collectives(
            t, r, lambda c: () if (c.op, c.phase) == ("reduce_scatter", "backward") else (c,)
        ),
    )
    expect_first(
        silent,
        """gradients are right in layers.0.feed_forward.w1.weight, layers.0.feed_forward.w3.weight and what follows, and wrong in all parameters before: backward moves less than planned over tp""",
    )


def test_a_backward_pass_that_goes_wrong_where_blocks_are_recomputed_need_not_have_lost_anything() -> None:
    trial = trial_of(tiny_case("fsdp_2", activation_checkpointing="full"))
    wrong = {rank: [(rank, fqn) for fqn in trial.plan.shapes if fqn != LAST] for rank in trial.ranks}
    fact = _lost_before(trial, [pair for pairs in wrong.values() for pair in pairs], 1)
    assert fact is not None
    assert cause_line(fact.cause) == (
        f"gradients are right in {LAST}, and wrong in all parameters before: backward goes wrong there, or recomputation"
        " differs from forward"
    )


def test_a_gradient_is_as_wrong_as_the_check_says_relative_to_the_whole_parameter() -> None:
    small = {
        f: g * np.where(np.arange(g.shape[0]) < g.shape[0] // 2, 1.0, 1e-12).reshape(-1, *[1] * (g.ndim - 1))
        for f, g in DDP_2.reference.steps[0].gradients.items()
    }
    trial = trial_of(tiny_case("fsdp_2"))
    steps = (replace(trial.reference.steps[0], gradients=small), *trial.reference.steps[1:])
    trial = replace(trial, reference=replace(trial.reference, steps=steps))
    trial = with_step_1_gradients(trial, lambda rank, fqn: small[fqn] * (1 + 1e-3 * rank))
    assert wrong_pairs(trial, 1) == []
    assert judged("gradients", trial).verdict is Verdict.PASS
