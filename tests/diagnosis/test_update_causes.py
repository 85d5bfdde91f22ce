"""Clipping, learning rate, weight decay and moments that are not the recipe's, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import LOW_CLIP, NORM, diagnosis_text, expect, expect_first, first_line, trained_as
from literal import (
    ADAMW,
    SGD,
    judged,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_rank,
    with_step,
    with_updates_that_follow,
    with_value,
)
from literal_reference import clip, optimize

from harness.checks import judge
from harness.diagnosis import diagnose
from harness.diagnosis.clipping import wrong_clipping
from harness.diagnosis.engine import explain
from harness.diagnosis.optimizer import _rates_and_decays, wrong_optimizer
from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig
from harness.report.cause_text import cause_line

Arrays = dict[str, np.ndarray]

# ---- updates


def test_norm_weights_that_decay_although_only_matrices_should() -> None:
    expect_first(
        trained_as(ADAMW, requested=replace(ADAMW, decay="matrices")),
        """weight decay is applied to norm weights as well, requested matrices only""",
    )


def test_norm_weights_that_do_not_decay_although_all_should() -> None:
    expect_first(
        trained_as(replace(ADAMW, decay="matrices")),
        """weight decay is applied to matrices only, requested all parameters""",
    )


PEAK = ", the peak, as without a schedule"


@pytest.mark.parametrize(("factor", "constant", "hint"), [(2.0, True, PEAK), (2.0, False, ""), (1.5, False, "")])
def test_a_group_with_a_learning_rate_of_its_own(factor: float, constant: bool, hint: str) -> None:
    trial = trial_of(tiny_case("fsdp_2", replace(SGD, decay="matrices")))
    rates, peak = [step.lr for step in trial.reference.steps], trial.case.training.lr

    def rate(step: int, fqn: str) -> float:
        if "norm" not in fqn:
            return rates[step - 1]
        return peak if constant else factor * rates[step - 1]

    trial = trained_otherwise(trial, rate=rate)
    assert first_line(trial) == (
        "the learning rate of 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more)"
        f" is {factor * 0.025:.6g} in step 1{hint}, requested 0.025"
    )
    assert "1 of 1 failing checks pass" in diagnosis_text(trial)
    proposed = [one for one in _rates_and_decays(trial) if one.cause.kind == "learning rate"]
    assert len(proposed) == (2 if factor == 2 else 1), "that of the first step may be the peak as well"


def test_clipping_left_out_everywhere() -> None:
    expect(
        trained_as(replace(LOW_CLIP, max_norm=None), requested=LOW_CLIP),
        """\
gradients are not clipped (coefficient 0.1537)
  assuming this: 1 of 1 failing checks pass, and no passing check fails
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_clipping_left_out_with_sgd() -> None:
    requested = replace(SGD, max_norm=0.25)
    expect_first(
        trained_as(replace(requested, max_norm=None), requested=requested),
        """gradients are not clipped (coefficient 0.1537)""",
    )


def test_clipping_left_out_on_some_ranks() -> None:
    trial = trial_of(tiny_case("hsdp_2x2", LOW_CLIP))
    wrong = trained_as(replace(LOW_CLIP, max_norm=None), "hsdp_2x2", LOW_CLIP)
    for rank in (1, 3):
        trial = with_rank(trial, rank, steps=wrong.ranks[rank].steps)
    expect_first(
        trial,
        """clipping is not applied to every parameter on ranks [1,3] (coefficient 0.1537)""",
    )


def test_clipping_left_out_for_one_parameter() -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: g if fqn == NORM else clip(norm, LOW_CLIP) * g for fqn, g in gradients.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", LOW_CLIP)), given=given)
    expect_first(trial, """clipping is not applied to 1 of 12 parameters (norm.weight) (coefficient 0.1537)""")


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_that_was_not_requested(nesterov: bool) -> None:
    held: Arrays = {}

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        decayed = {fqn: clip(norm, SGD) * g + SGD.weight_decay * parameters[fqn] for fqn, g in gradients.items()}
        held.update({fqn: 0.9 * held.get(fqn, 0.0) + g for fqn, g in decayed.items()})
        return {fqn: g + 0.9 * held[fqn] if nesterov else held[fqn] for fqn, g in decayed.items()}

    trial = trained_otherwise(
        trial_of(tiny_case("fsdp_2", SGD)), given=given, recipe=lambda step, fqn: replace(SGD, weight_decay=0.0)
    )
    for rank, step, _ in list(trial.steps()):
        kept = step.memory | {"optimizer_state": step.memory["parameters"]}
        trial = with_step(trial, rank, step.step, memory=kept)
    expect_first(trial, f"SGD has {'Nesterov ' * nesterov}momentum 0.9, requested none")


def test_each_rank_clips_by_the_norm_of_its_own_shards() -> None:
    trial = trial_of(tiny_case("fsdp_2", LOW_CLIP))
    alone = [
        with_updates_that_follow(replace(trial, run=replace(trial.run, ranks={rank: trial.ranks[rank]})))
        for rank in (0, 1)
    ]
    for rank, other in enumerate(alone):
        trial = with_rank(trial, rank, steps=other.ranks[rank].steps)
    expect_first(
        trial,
        """each rank clips by the norm of its own shards (not summed over dp_shard), not by the global norm: 1.14235 on rank 0, expected 1.62647""",
    )


def test_another_learning_rate_than_the_optimizer_shows() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    rates = [step.lr for step in trial.reference.steps]
    expect_first(
        trained_otherwise(trial, rate=lambda step, fqn: 1.5 * rates[step - 1]),
        """every optimizer step is 1.5 times what it should be, as with 1.5 times the learning rate""",
    )


def with_rates(*rates: float, reported: tuple[float, ...] = ()) -> Trial:
    """What the optimizer shows, and steps by; and what it reports, where that is something else."""
    trial = trained_otherwise(trial_of(tiny_case("fsdp_2")), rate=lambda step, fqn: rates[step - 1])
    for rank, (step, lr) in itertools.product(trial.ranks, enumerate(rates, start=1)):
        trial = with_step(trial, rank, step, lr=lr, reported_lr=(reported or rates)[step - 1])
    return trial


def test_a_schedule_that_is_a_step_early() -> None:
    expect_first(
        with_rates(0.01, 0.0075, 0.0075),
        """learning rate of step 1 is 0.01 (the schedule's of step 2), requested 0.005""",
    )


def test_requested_rates_that_are_reported_are_no_mistake_beside_those_that_are_taken() -> None:
    requested = tuple(step.lr for step in trial_of(tiny_case("fsdp_2")).reference.steps)
    told = "learning rate of step 1 is 0.01234 (reported as requested), requested 0.005"
    expect_first(with_rates(0.01234, 0.01, 0.0075, reported=requested), told)
    other = with_rates(0.01234, 0.01, 0.0075, reported=(0.005, 0.02, 0.02))
    assert first_line(other) == "learning rate of step 1 is 0.01234, requested 0.005"
    assert "also seen: the reported learning rate is wrong" in diagnosis_text(other)


def test_a_learning_rate_of_no_schedule() -> None:
    expect_first(with_rates(0.01234, 0.01, 0.0075), """learning rate of step 1 is 0.01234, requested 0.005""")


def test_parameters_that_the_optimizer_does_not_know() -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(norm, ADAMW) * g for fqn, g in gradients.items() if fqn != NORM}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2")), given=given)
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
update: rank 1, step 2, the optimizer's step of norm.weight: expected -0.000751532890095663, observed 0.00024846710990433785 (entry (1,), ratio -0.3306137538; 2 of 2 entries wrong; bound 1.5e-14)
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_a_norm_that_counts_replicas() -> None:
    low = replace(SGD, max_norm=0.25)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(2**0.5 * norm, low) * g for fqn, g in gradients.items()}

    expect_first(
        trained_otherwise(trial_of(tiny_case("hsdp_2x2", low)), given=given),
        """each rank clips by a norm that counts every replica along dp_replicate, not by the global norm: 2.30017 on rank 0, expected 1.62647""",
    )


def test_clipping_that_enlarges() -> None:
    high = replace(SGD, max_norm=100.0)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: 100.0 / (norm + 1e-6) * g for fqn, g in gradients.items()}

    expect_first(
        trained_otherwise(trial_of(tiny_case("fsdp_2", high)), given=given),
        """clipping enlarges gradients: it multiplies by 61.48 although the norm 1.626 is below max_norm 100""",
    )


def test_an_optimizer_that_stops_after_the_first_step() -> None:
    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        return {fqn: clip(norm, ADAMW) * g for fqn, g in gradients.items()} if step == 1 else {}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2")), given=given)
    expect_first(trial, """the optimizer does not move any parameter in step 2""")


def test_a_first_step_without_a_learning_rate_is_named_by_it() -> None:
    expect_first(
        with_rates(0.0, 0.005, 0.01),
        """learning rate of step 1 is 0, requested 0.005: every step takes the rate of the step before""",
    )


def test_what_no_mistake_of_the_optimizer_explains_is_blamed_on_none() -> None:
    """Noise on every parameter: a hypothesis that could fit it could fit anything."""
    draw = np.random.default_rng(1)

    def left(step: int, parameters: Arrays) -> Arrays:
        return {fqn: p + 1e-3 * draw.standard_normal(p.shape) for fqn, p in parameters.items()}

    trial = trained_otherwise(trial_of(tiny_case("fsdp_2")), left=left)
    found = explain(trial, judge(trial), (wrong_optimizer, wrong_clipping), ())
    assert found.left == ("update",)


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
    assert first_line(adding(0.05)).startswith("update: ")
    requested = replace(trial.case, training=replace(ADAMW, decay="matrices"))
    assert first_line(replace(adding(0.1, spared="norm"), case=requested)) == told
    assert first_line(replace(adding(0.1), case=requested)).startswith("update: ")


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
    assert "AMSGrad" not in first_line(keeping(wrong, "max_exp_avg_sq"))  # it does not explain this
    assert diagnose(keeping(right, "max_exp_avg_sq"), judge(keeping(right, "max_exp_avg_sq"))) is None


# ---- updates


def test_a_rate_of_one_replica_is_told_with_the_ranks_that_have_it() -> None:
    trial = trial_of(tiny_case("ddp_2", SGD))
    rates = [step.lr for step in trial.reference.steps]
    late = trained_otherwise(trial, [1], rate=lambda step, fqn: 0.1234 if step == 2 else rates[step - 1])
    late = with_step(late, 1, 2, lr=0.1234)
    proposed = [cause_line(one.cause) for one in wrong_optimizer(late, {"update": judged("update", late)})]
    assert proposed[0] == "learning rate of step 2 on rank 1 is 0.1234 (reported as requested), requested 0.05"
