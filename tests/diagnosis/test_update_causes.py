"""Clipping, learning rate, weight decay and moments that are not the recipe's, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import LOW_CLIP, NORM, expect, expect_first, first_line
from literal import ADAMW, SGD, tiny_case, trial_of, with_rank, with_step, with_updates_that_follow, with_value
from literal_reference import optimize

from harness.checks import judge
from harness.checks.update import observed_norm
from harness.diagnosis import diagnose
from harness.diagnosis.updates import _enlarged, _not_clipped, _wrong_lr
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig
from harness.spec.dims import ParallelDims

# ---- updates


def test_norm_weights_that_decay_although_only_matrices_should() -> None:
    expect_first(
        trained_as(ADAMW, asked=replace(ADAMW, decay="matrices")),
        """weight decay is applied to norm weights as well, requested matrices only""",
    )


def test_norm_weights_that_do_not_decay_although_all_should() -> None:
    expect_first(
        trained_as(replace(ADAMW, decay="matrices")),
        """weight decay is applied to matrices only, requested all parameters""",
    )


@pytest.mark.parametrize("factor, hint", [(2.0, ", the peak's, as without a schedule"), (1.5, "")])
def test_a_group_with_a_learning_rate_of_its_own(factor: float, hint: str) -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(SGD, decay="matrices")))
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            if "norm" in tensor.fqn:

                def scaled(after: np.ndarray, before: np.ndarray = tensor.value) -> np.ndarray:
                    return before + factor * (after - before)

                trial = with_value(trial, rank, 1, "parameters", tensor.fqn, scaled)
    assert first_line(trial) == (
        "the learning rate of 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more)"
        f" is {factor * 0.025:.6g} in step 1{hint}, requested 0.025"
    )


def trained_as(training, layout: str | ParallelDims = "fsdp_2", asked=ADAMW) -> Trial:
    """What a run leaves whose optimizer had another recipe; gradients are those of the recipe requested."""
    trial = trial_of(tiny_case(layout, asked))
    other = replace(trial, case=replace(trial.case, training=training))
    return replace(with_updates_that_follow(other), case=trial.case)


def test_clipping_left_out_everywhere() -> None:
    expect(
        trained_as(replace(LOW_CLIP, max_norm=None), asked=LOW_CLIP),
        """\
gradients are not clipped (coefficient 0.1537)
  update: rank 0, step 1, tok_embeddings.weight: expected entry (2, 3) moved by -0.00502066, observed moved by -0.00502066 (ratio 1.000000367); 16 of 16 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_clipping_left_out_with_sgd() -> None:
    asked = replace(SGD, max_norm=0.25)
    expect_first(
        trained_as(replace(asked, max_norm=None), asked=asked), """gradients are not clipped (coefficient 0.1537)"""
    )


def test_clipping_left_out_on_some_ranks() -> None:
    trial = trial_of(tiny_case("hsdp_2x2", LOW_CLIP))
    wrong = trained_as(replace(LOW_CLIP, max_norm=None), "hsdp_2x2", LOW_CLIP)
    for rank in (1, 3):
        trial = with_rank(trial, rank, steps=wrong.ranks[rank].steps)
    expect_first(
        trial,
        """clipping is not applied to tok_embeddings.weight, layers.0.attention.wq.weight and 10 more on ranks [1,3] (coefficient 0.1537)""",
    )


def test_clipping_left_out_for_one_parameter() -> None:
    trial, wrong = trial_of(tiny_case("fsdp_2", LOW_CLIP)), trained_as(replace(LOW_CLIP, max_norm=None), asked=LOW_CLIP)
    for rank, step in itertools.product((0, 1), (1, 2, 3)):
        record = wrong.ranks[rank].steps[step - 1]
        trial = with_value(trial, rank, step, "parameters", NORM, lambda _, record=record: record.parameters[NORM])
    expect_first(trial, """clipping is not applied to norm.weight (coefficient 0.1537)""")


def test_each_rank_clips_by_the_norm_of_its_own_shards() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    alone = [
        with_updates_that_follow(replace(trial, run=replace(trial.run, ranks={rank: trial.ranks[rank]})))
        for rank in (0, 1)
    ]
    for rank, other in enumerate(alone):
        steps = [replace(s, grad_norm=trial.reference.steps[0].grad_norm) for s in other.ranks[rank].steps]
        trial = with_rank(trial, rank, steps=tuple(steps))
    expect_first(
        trial,
        """each rank clips by the norm of its own shards, not by the global norm: 1.14235 on rank 0, expected 1.62647""",
    )


def test_weight_decay_left_out() -> None:
    expect_first(trained_as(replace(ADAMW, weight_decay=0.0)), """weight decay is not applied, requested 0.1""")


def test_weight_decay_left_out_of_sgd() -> None:
    expect_first(
        trained_as(replace(SGD, weight_decay=0.0), asked=SGD), """weight decay is not applied, requested 0.1"""
    )


def test_the_librarys_default_of_weight_decay() -> None:
    expect_first(
        trained_as(replace(ADAMW, weight_decay=0.01)), """weight decay is 0.01 in the optimizer, requested 0.1"""
    )


def test_the_librarys_default_of_beta2() -> None:
    expect(
        trained_as(replace(ADAMW, beta2=0.999)),
        """\
beta2 is 0.999 in the optimizer, requested 0.95
  update: rank 0, step 2, tok_embeddings.weight: expected entry (2, 3) moved by -0.00336019, observed moved by -0.0033308 (ratio 0.9912529854); 16 of 16 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_beta1() -> None:
    expect_first(trained_as(replace(ADAMW, beta1=0.95)), """beta1 is 0.95 in the optimizer, requested 0.9""")


def test_another_beta1_that_nobody_uses() -> None:
    expect(
        trained_as(replace(ADAMW, beta1=0.876)),
        """\
the optimizer step is wrong, the gradients are right: first at rank 0, step 2, tok_embeddings.weight
  why: step 1 is right everywhere: look at what is carried from step to step (beta1, beta2, state, schedule)
  update: rank 0, step 2, tok_embeddings.weight: expected entry (2, 3) moved by -0.00336019, observed moved by -0.00323439 (ratio 0.9625612237); 16 of 16 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_eps() -> None:
    expect_first(trained_as(replace(ADAMW, eps=1e-5)), """eps is 1e-05 in the optimizer, requested 1e-08""")


def test_another_limit_of_the_norm() -> None:
    expect_first(
        trained_as(replace(LOW_CLIP, max_norm=0.5), asked=LOW_CLIP),
        """the gradient norm's limit is 0.5 in the optimizer, requested 0.25""",
    )


def test_another_learning_rate_than_the_optimizer_shows() -> None:
    expect_first(
        trained_as(replace(ADAMW, lr=0.02)),
        """every optimizer step is 2 times what it should be, as by 2 times the learning rate""",
    )


def with_rates(trial: Trial, *rates: float) -> Trial:
    for rank, (step, lr) in itertools.product(trial.ranks, enumerate(rates, start=1)):
        trial = with_step(trial, rank, step, lr=lr)
    return trial


def test_a_schedule_that_is_a_step_early() -> None:
    expect_first(
        with_rates(trained_as(replace(ADAMW, lr=0.02)), 0.01, 0.0075, 0.0075),
        """learning rate of step 1 is 0.01, the schedule's of step 2, requested 0.005""",
    )


def test_a_learning_rate_of_no_schedule() -> None:
    expect_first(
        with_rates(trained_as(replace(ADAMW, lr=0.02)), 0.01234, 0.02, 0.015),
        """learning rate of step 1 is 0.01234, requested 0.005""",
    )


def test_parameters_that_the_optimizer_does_not_know() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, step in itertools.product((0, 1), (1, 2, 3)):
        start = next(t.value for t in trial.ranks[rank].parameters if t.fqn == NORM)
        trial = with_value(trial, rank, step, "parameters", NORM, lambda _, start=start: start)
    expect_first(trial, """the optimizer does not move 1 of 12 parameters (norm.weight) in step 1""")


def test_parameters_that_become_nan() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expect_first(
        with_value(trial, 1, 1, "parameters", NORM, lambda value: value * np.nan),
        """parameters are NaN or infinite after step 1 in 1 of 12 parameters (norm.weight) on rank 1, gradients were finite""",
    )


def test_an_optimizer_that_is_wrong_otherwise() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expect(
        with_value(trial, 1, 2, "parameters", NORM, lambda value: value + 1e-3),
        """\
the optimizer step is wrong, the gradients are right: first at rank 1, step 2, norm.weight
  why: step 1 is right everywhere: look at what is carried from step to step (beta1, beta2, state, schedule)
  update: rank 1, step 2, norm.weight: expected entry (1,) moved by -0.000751533, observed moved by 0.000248467 (ratio -0.3306137538); 2 of 2 entries wrong
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_a_norm_that_counts_replicas() -> None:
    low = replace(SGD, max_norm=0.25)
    trial = trial_of(tiny_case("hsdp_2x2", low))
    norm = observed_norm(trial, 1)
    again = replace(low, max_norm=0.25 * (norm + 1e-6) / (2**0.5 * norm + 1e-6))
    followed = with_updates_that_follow(replace(trial, case=replace(trial.case, training=again)))
    expect_first(
        replace(followed, case=trial.case),
        """each rank clips by a norm with each replica along dp_replicate counted again, not by the global norm: 2.30017 on rank 0, expected 1.62647""",
    )


def test_clipping_that_enlarges() -> None:
    high = replace(SGD, max_norm=100.0)
    trial = trial_of(tiny_case("fsdp_2", high))
    for rank, evidence in trial.ranks.items():
        step = evidence.steps[0]
        factor = 100.0 / (trial.reference.steps[0].grad_norm + 1e-6)
        moved = {t.fqn: optimize(t.value, [factor * step.gradients[t.fqn]], high)[0] for t in evidence.parameters}
        trial = with_step(trial, rank, 1, parameters=moved)
    expect_first(
        trial, """clipping enlarges gradients: it multiplies by 61.48, as the norm 1.626 is below max_norm 100"""
    )


def test_an_optimizer_that_stops_after_the_first_step() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, evidence in trial.ranks.items():
        for step in (2, 3):
            trial = with_step(trial, rank, step, parameters=evidence.steps[0].parameters)
    expect_first(trial, """the optimizer does not move any parameter in step 2""")


def test_a_first_step_without_a_learning_rate_is_named_by_it() -> None:
    still = trained_as(replace(trial_of(tiny_case("fsdp_2")).case.training, lr=0.0))
    rates = [step.lr for step in still.reference.steps]
    expect_first(with_rates(still, 0.0, *rates[:-1]), """learning rate of step 1 is 0, requested 0.005""")


# ---- what the optimizer receives


def optimizing(trial: Trial, feed: Any, training: TrainingConfig) -> Trial:
    """What AdamW of that recipe leaves if it receives feed(fqn, gradient, parameter before)."""
    for rank, evidence in trial.ranks.items():
        starts = {t.fqn: t.value for t in evidence.parameters}
        given: dict[str, list[np.ndarray]] = {fqn: [] for fqn in starts}
        before, state = starts, {}
        for step in evidence.steps:
            for fqn, gradient in step.gradients.items():
                given[fqn].append(feed(fqn, gradient, before[fqn], trial.reference.steps[step.step - 1].grad_norm))
            made = {fqn: optimize(start, given[fqn], training) for fqn, start in starts.items()}
            before, state = {f: value for f, (value, _) in made.items()}, {f: s for f, (_, s) in made.items()}
            kept = state if step.step == 3 else {}
            trial = with_step(trial, rank, step.step, parameters=before, optimizer_state=kept)
    return trial


NO_DECAY = replace(ADAMW, weight_decay=0.0)


def test_weight_decay_in_the_gradients_is_told_from_another_weight_decay() -> None:
    trial = trial_of(tiny_case("fsdp_2"))

    def adding(decay: float, spared: str = "-") -> Trial:
        def feed(fqn: str, gradient: np.ndarray, before: np.ndarray, norm: float) -> np.ndarray:
            return gradient / (norm + 1e-6) + (0 if spared in fqn else decay) * before

        return optimizing(trial, feed, NO_DECAY)

    told = "weight decay is added to the gradients (L2, as Adam does), requested decoupled (AdamW)"
    assert first_line(adding(0.1)) == told
    assert first_line(adding(0.05)).startswith("the optimizer step is wrong")
    asked = replace(trial.case, training=replace(ADAMW, decay="matrices"))
    assert first_line(replace(adding(0.1, spared="norm"), case=asked)) == told
    assert first_line(replace(adding(0.1), case=asked)).startswith("the optimizer step is wrong")


@pytest.mark.parametrize("limit", [0.25, 1.6])
def test_a_coefficient_without_the_1e_6_is_told_from_no_clipping(limit: float) -> None:
    """Of the norms of these steps one is above 1.6, two below."""
    training = replace(ADAMW, max_norm=limit)

    def feed(fqn: str, gradient: np.ndarray, before: np.ndarray, norm: float) -> np.ndarray:
        return min(1.0, limit / norm) * gradient

    trial = trial_of(tiny_case("fsdp_2", training))
    told = "clipping multiplies by max_norm / norm, requested max_norm / (norm + 1e-6), as torch does"
    assert first_line(optimizing(trial, feed, training)) == told


def test_a_largest_second_moment_is_blamed_only_where_updates_are_wrong() -> None:
    def keeping(trial: Trial, name: str) -> Trial:
        state = trial.ranks[0].steps[2].optimizer_state
        kept = {fqn: arrays | {name: arrays["exp_avg_sq"]} for fqn, arrays in state.items()}
        return with_step(trial, 0, 3, optimizer_state=kept)

    right = trial_of(tiny_case("fsdp_2"))
    wrong = with_value(right, 1, 2, "parameters", NORM, lambda value: value + 1e-3)
    told = "the optimizer is AMSGrad (it keeps max_exp_avg_sq and divides by that), requested AdamW without it"
    assert first_line(keeping(wrong, "max_exp_avg_sq")) == told
    assert first_line(keeping(wrong, "exp_inf")).startswith("the optimizer step is wrong")
    assert diagnose(keeping(right, "max_exp_avg_sq"), judge(keeping(right, "max_exp_avg_sq"))) is None


# ---- updates


def test_a_norm_below_the_limit_leaves_nothing_to_clip() -> None:
    below = trial_of(tiny_case("ddp_2", replace(ADAMW, max_norm=9.0)))
    assert _not_clipped(below) is None and _enlarged(below) is None
    none = trial_of(tiny_case("ddp_2", replace(ADAMW, max_norm=None)))
    assert _not_clipped(none) is None and _enlarged(none) is None


def test_a_rate_is_told_with_the_ranks_that_have_it_in_that_step() -> None:
    trial = trial_of(tiny_case("ddp_2", SGD))
    rate = trial.reference.steps[2].lr
    late = with_step(with_step(trial, 1, 2, lr=0.1234), 0, 3, lr=rate)
    assert _wrong_lr(late) == "learning rate of step 2 is 0.1234 on rank 1, requested 0.05"
    near = with_step(trial, 1, 2, lr=rate * (1 + 1e-10))
    assert _wrong_lr(near) == f"learning rate of step 2 is {rate:.6g} on rank 1, requested 0.05"
