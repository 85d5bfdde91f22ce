"""Gradients that are a multiple of the requested ones: by what factor, where and when. Literal evidence, no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from caused import causes_of, data_of
from diagnosed import (
    LAST,
    NORM,
    dims,
    fsdp_4,
    kinds,
    proven,
    reference_gradient,
    scaled,
    with_factors,
)
from literal import ADAMW, TINY, tiny_case, trained_otherwise, trial_of, with_step, with_step_1_gradients
from literal_reference import clip

from harness.core.case.dims import ParallelDims
from harness.core.causes.contributions import sums_of_whole_gradients
from harness.core.causes.engine import explain
from harness.core.checks import judge
from harness.core.judge.losses import losses_of_rank
from harness.core.judge.trial import Trial

WQ = "layers.0.attention.wq.weight"
TIED = replace(TINY, tied_embeddings=True)


def names(trial: Trial) -> str:
    """Which numbers of the case the factor is said to be."""
    return str(proven(trial)[1]["named"])


def factor_of(trial: Trial) -> object:
    kind, details = proven(trial)
    assert kind == "gradients scaled"
    return pytest.approx(details["factor"], rel=1e-9)


# ---- one factor


@pytest.mark.parametrize(
    ("layout", "accumulation", "factor", "named"),
    [
        (dims(shard=4), 1, 1 / 4, ["extra", "dp_shard"]),
        (dims(replicate=2), 1, 2, ["not divided", "dp_replicate"]),
        (dims(2, 4), 1, 1 / 8, ["extra", "dp_replicate x dp_shard", "number of samples"]),
        (dims(tp=2), 1, 2, ["not divided", "tp"]),
        (dims(1, 4), 2, 2, ["not divided", "accumulation"]),
        (dims(1, 4), 1, -1, ["sign"]),
        (dims(1, 4), 1, 1.7, []),
        (dims(1, 4), 1, 16.0, []),  # the number of valid tokens in one step is none where another has others
    ],
)
def test_a_factor_is_named_by_the_number_of_the_case_that_it_is(
    layout: ParallelDims, accumulation: int, factor: float, named: list[str]
) -> None:
    trial = scaled(layout, factor, accumulation=accumulation)
    assert factor_of(trial) == factor
    assert all(one in names(trial) for one in named) and bool(named) == bool(names(trial))


def by_tokens(trial: Trial, factor: Callable[[int, int], float]) -> Trial:
    """factor(valid tokens of the step, all tokens of it)."""
    valid = {step.step: step.valid_tokens for step in trial.reference.steps}
    assert len(set(valid.values())) > 1
    return with_factors(trial, lambda rank, step, fqn: factor(valid[step], 32))


@pytest.mark.parametrize(
    ("factor", "named"),
    [
        (lambda valid, size: valid, "not divided by the number of valid tokens"),
        (lambda valid, size: 1 / valid, "divided an extra time by the number of valid tokens"),
        (lambda valid, size: valid / size, "the number of all tokens"),
    ],
)
def test_a_number_of_tokens_is_tested_in_every_step(factor: Callable[[int, int], float], named: str) -> None:
    wrong = by_tokens(fsdp_4(), factor)
    assert factor_of(wrong) == factor(16, 32) and named in names(wrong)


@pytest.mark.parametrize("times", [1, 2])
def test_tokens_of_one_microbatch_in_the_place_of_all_are_named(times: int) -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    valid = {step.step: step.valid_tokens for step in trial.reference.steps}
    alone = {step: sum(losses_of_rank(trial, rank, step)[1][1] for rank in (0, 1)) for step in valid}
    wrong = with_factors(trial, lambda rank, step, fqn: valid[step] / (times * alone[step]))
    assert factor_of(wrong) == valid[1] / (times * alone[1]) and "microbatch 2" in names(wrong)


def test_the_reported_loss_goes_with_gradients_that_are_divided_by_the_same_number() -> None:
    trial = scaled(dims(1, 4), 0.25)
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, reported_loss=0.25 * step.reported_loss)
    assert factor_of(trial) == 0.25


def test_a_factor_that_stays_is_a_cause_and_one_of_one_step_is_located() -> None:
    for factor in (3.0, 0.5, 0.0):
        stays = with_factors(fsdp_4(), lambda rank, step, fqn, by=factor: by if step >= 2 else 1.0)
        assert factor_of(stays) == factor and proven(stays)[1]["steps"] == (2, 3)
    for factor, step in itertools.product((3.0, 0.5), (1, 2, 3)):
        once = with_factors(fsdp_4(), lambda rank, at, fqn, step=step, by=factor: by if at == step else 1.0)
        (cause,) = causes_of(once)
        data = {"place": "gradients", "step": step, "factor": pytest.approx(factor, rel=1e-9)}
        assert data_of(cause, *data) == ("not explained", *data.values())
    degree = with_factors(fsdp_4(), lambda rank, step, fqn: 0.25 if step == 3 else 1.0)
    assert factor_of(degree) == 0.25 and names(degree) == ""  # all entries confirm it, and none says why
    none = with_factors(fsdp_4(), lambda rank, step, fqn: 0.0 if step == 2 else 1.0)
    assert factor_of(none) == 0 and proven(none)[1]["steps"] == (2,)  # nothing is fitted


@pytest.mark.parametrize("step", [2, 3])
def test_a_count_that_is_wrong_in_one_step_is_none_of_another_step(step: int) -> None:
    counts = {one.step: one.valid_tokens for one in fsdp_4().reference.steps}
    by = counts[step] / counts[step - 1]
    assert by != 1
    wrong = with_factors(fsdp_4(), lambda rank, at, fqn: by if at == step else 1.0)
    assert kinds(wrong) == ("not explained",)


# ---- of some parameters


@pytest.mark.parametrize(
    ("layout", "odd"),
    [
        ("fsdp_2", {NORM: 0.0}),
        ("tp_2", {"layers.0.attention_norm.weight": 0.5, "layers.0.ffn_norm.weight": 0.5, NORM: 0.5}),
        ("fsdp_2", {LAST: 2.0, NORM: 4.0}),
        ("ddp_2", {WQ: 0.25, "tok_embeddings.weight": 0.25, NORM: 0.5}),
    ],
)
@pytest.mark.parametrize("since", [1, 2])
def test_factors_of_some_parameters_are_found_with_these(layout: str, odd: dict[str, float], since: int) -> None:
    trial = trial_of(tiny_case(layout))
    kind, details = proven(with_factors(trial, lambda rank, step, fqn: odd.get(fqn, 1.0) if step >= since else 1.0))
    assert kind == "gradients scaled" and {*details["parameters"]} == {*odd}
    assert details["steps"] == tuple(range(since, 4))
    several = tuple(sorted({*odd.values()}))
    assert details.get("factors", (details.get("factor"),)) == pytest.approx(several, abs=1e-12)


def test_a_tied_weight_whose_gradient_is_added_twice_is_no_matter_of_degrees() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=TIED))
    wrong = with_factors(trial, lambda rank, step, fqn: 1.0 + fqn.startswith("tok"))
    assert factor_of(wrong) == 2 and "output" in names(wrong)
    assert "dp_shard" in names(with_factors(trial, lambda rank, step, fqn: 2.0))


def nothing(trial: Trial) -> None:
    found = explain(trial, judge(trial), (sums_of_whole_gradients,), ())
    assert not any(proof.is_complete for proof in found.proofs)


def test_other_factors_in_each_step_on_each_replica_or_of_each_entry_are_none() -> None:
    nothing(with_factors(fsdp_4(), lambda rank, step, fqn: (1.0, 3.0, 5.5)[step - 1]))
    nothing(with_factors(trial_of(tiny_case("ddp_2")), lambda rank, step, fqn: 1.0 + rank))
    trial, draw = fsdp_4(), np.random.default_rng(1)
    noise = {fqn: draw.standard_normal(shape) for fqn, shape in trial.plan.shapes.items()}
    wrong = with_step_1_gradients(trial, lambda _, fqn: reference_gradient(trial, fqn) + noise[fqn])
    nothing(wrong)
    assert kinds(wrong) == ("not explained",)


def test_gradients_that_are_clipped_before_they_are_unscaled() -> None:
    training = replace(ADAMW, max_norm=0.25)

    def given(step: int, gradients: dict, norm: float, parameters: dict) -> dict:
        return {fqn: clip(norm, training) * gradient / 64 for fqn, gradient in gradients.items()}

    scale = lambda step, own: {fqn: 64 * gradient for fqn, gradient in own.items()}  # noqa: E731
    assert factor_of(trained_otherwise(trial_of(tiny_case("fsdp_2", training)), gradients=scale, given=given)) == 64


# ---- with those of the step before

Gradients = dict[str, np.ndarray]


def not_zeroed(trial: Trial, fqns: Sequence[str], steps: Sequence[int], clipped: bool, turned: str = "") -> Trial:
    """In these steps these gradients hold what there was before, of one parameter turned around."""
    left: Gradients = {}

    def gradients(step: int, own: Gradients) -> Gradients:
        before = {fqn: left[fqn][::-1] if fqn == turned else left[fqn] for fqn in left}
        total = {fqn: g + before[fqn] if step in steps and fqn in fqns else g for fqn, g in own.items()}
        norm = np.sqrt(sum(np.sum(g**2) for g in total.values()))
        left.update({fqn: min(1.0, 1.0 / (norm + 1e-6)) * g if clipped else g for fqn, g in total.items()})
        return total

    return trained_otherwise(trial, gradients=gradients)


@pytest.mark.parametrize("clipped", [False, True])
@pytest.mark.parametrize("steps", [(2, 3), (2,)])
@pytest.mark.parametrize("fqns", [(), (NORM, LAST)])
def test_gradients_that_are_not_zeroed(clipped: bool, steps: tuple[int, ...], fqns: tuple[str, ...]) -> None:
    kind, details = proven(not_zeroed(fsdp_4(), fqns or (*fsdp_4().plan.shapes,), steps, clipped))
    assert kind == "gradients not zeroed" and details["steps"] == steps
    assert details.get("parameters", ()) == fqns


def test_gradients_that_hold_others_of_the_step_before_are_zeroed() -> None:
    nothing(not_zeroed(fsdp_4(), (NORM, LAST), (2, 3), clipped=False, turned=NORM))
