"""Gradients that are a multiple of the requested ones, named by what is tested of it. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    LAST,
    NORM,
    dims,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    reference_gradient,
    scaled,
    with_factors,
)
from literal import (
    ADAMW,
    TINY,
    tiny_case,
    trained_otherwise,
    trial_of,
    with_step,
    with_step_1_gradients,
    with_updates_that_follow,
)
from literal_reference import clip

from harness.checks import judge
from harness.diagnosis.engine import explain
from harness.diagnosis.factors import factor_text, token_factors
from harness.diagnosis.scaled import _by_stage, gradients_not_zeroed, scaled_gradients
from harness.judge.losses import losses
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

WQ = "layers.0.attention.wq.weight"


def proposed(trial: Trial) -> list[str]:
    found = explain(trial, judge(trial), (scaled_gradients, gradients_not_zeroed), ())
    return [cause_line(one.cause) for proof in found.proofs if proof.complete for one in proof.hypotheses]


# ---- one factor


@pytest.mark.parametrize(
    ("layout", "features", "factor", "name"),
    [
        (dims(shard=4), {}, 1 / 4, "as if divided an extra time by dp_shard (4)"),
        (dims(shard=4), {}, 4, "as if not divided by dp_shard (4)"),
        (dims(replicate=2), {}, 1 / 2, "as if divided an extra time by dp_replicate (2)"),
        (dims(replicate=2), {}, 2, "as if not divided by dp_replicate (2)"),
        (dims(2, 4), {}, 1 / 8, "as if divided an extra time by dp_replicate x dp_shard or the number of samples (8)"),
        (dims(2, 4), {}, 8, "as if not divided by dp_replicate x dp_shard or the number of samples (8)"),
        (dims(2, 4), {}, 4, "as if not divided by dp_shard (4)"),
        (dims(2, 2), {}, 2, "as if not divided by dp_replicate or dp_shard (2)"),
        (dims(1, 2, 2), {}, 1 / 2, "as if divided an extra time by dp_shard or tp (2)"),
        (dims(tp=2), {}, 2, "as if not divided by tp (2)"),
        (dims(1, 4), {"accumulation": 2}, 2, "as if not divided by accumulation (2)"),
        (dims(1, 4), {"accumulation": 2}, 1 / 8, "as if divided an extra time by dp_shard x accumulation or the number of samples (8)"),
        (dims(1, 4), {}, -1, "the sign is wrong"),
        (dims(1, 4), {}, 1.7, ""),
    ],
)  # fmt: skip
def test_a_factor_is_named_by_the_number_of_the_case_that_it_is(layout, features, factor, name) -> None:
    tail = f": {name}" if name else ""
    told = f"gradients are {factor:.6g} times what they should be in every parameter{tail}"
    assert first_line(scaled(layout, factor, **features)) == told


def by_tokens(trial: Trial, factor: Callable[[int, int], float]) -> Trial:
    """factor(valid tokens of the step, all tokens of it)."""
    valid = {step.step: step.valid_tokens for step in trial.reference.steps}
    assert len(set(valid.values())) > 1
    return with_factors(trial, lambda rank, step, fqn: factor(valid[step], 32))


@pytest.mark.parametrize(
    ("factor", "name"),
    [
        (lambda valid, size: valid, "not divided by the number of valid tokens (16)"),
        (lambda valid, size: 1 / valid, "divided an extra time by the number of valid tokens (16)"),
        (lambda valid, size: valid / size, "divided by the number of all tokens, not of the valid ones"),
    ],
)
def test_a_number_of_tokens_is_tested_in_every_step(factor, name) -> None:
    assert first_line(by_tokens(fsdp_4(), factor)).endswith(f"what they should be in every parameter: {name}")


def test_tokens_of_one_microbatch_in_the_place_of_all_are_named() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    valid = {step.step: step.valid_tokens for step in trial.reference.steps}
    alone = {step: sum(losses(trial, rank, step)[1][1] for rank in (0, 1)) for step in valid}
    for times, told in (
        (1, f"divided by the valid tokens of microbatch 2 alone ({alone[1]:g}, not {valid[1]})"),
        (2, f"divided by 2 times the valid tokens of microbatch 2 ({2 * alone[1]:g}, not {valid[1]})"),
    ):
        wrong = with_factors(trial, lambda rank, step, fqn, by=times: valid[step] / (by * alone[step]))
        assert told in first_line(wrong)


def test_a_number_of_tokens_of_one_step_in_all_steps_is_no_number_of_tokens() -> None:
    told = "gradients are 16 times what they should be in every parameter"
    assert first_line(scaled(dims(1, 4), 16.0)) == told


def test_the_reported_loss_goes_with_gradients_that_are_divided_by_the_same_number() -> None:
    trial = scaled(dims(1, 4), 0.25)
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            trial = with_step(trial, rank, step.step, reported_loss=0.25 * step.reported_loss)
    told = "gradients and the reported loss are 0.25 times what they should be in every parameter: as if divided an extra time by dp_shard (4)"
    assert first_line(trial) == told


def test_gradients_twice_too_large_show_a_number_to_check() -> None:
    expect(
        scaled("fsdp_2", 2.0),
        """\
gradients are 2 times what they should be in every parameter: as if not divided by dp_shard (2)
  assuming this: 2 of 2 failing checks pass, and no passing check fails
  gradients: rank 0, step 1, tok_embeddings.weight: 2 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_gradients_that_are_zero() -> None:
    trial = fsdp_4()
    expect_first(
        with_factors(trial, lambda rank, step, fqn: float(fqn != NORM)),
        """gradients are zero in 1 of 12 parameters (norm.weight)""",
    )


def test_norm_gradients_averaged_over_tp() -> None:
    trial = trial_of(tiny_case("tp_2"))
    expect_first(
        with_factors(trial, lambda rank, step, fqn: 0.5 if "norm" in fqn else 1.0),
        """gradients are 0.5 times what they should be in 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more): as if divided an extra time by tp (2)""",
    )


def test_a_tied_weight_whose_gradient_is_added_twice() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, tied_embeddings=True)))
    twice = with_factors(trial, lambda rank, step, fqn: 1.0 + fqn.startswith("tok"))
    assert first_line(twice) == (
        "gradients are 2 times what they should be in 1 of 11 parameters (tok_embeddings.weight): counted for the embedding"
        " and again for the output, which share it, or as if not divided by dp_shard (2)"
    )


def test_gradients_of_a_model_with_a_tied_weight_that_are_all_twice_too_large_are_not_counted_twice_for_that_one() -> (
    None
):
    trial = trial_of(tiny_case("fsdp_2", model=replace(TINY, tied_embeddings=True)))
    told = "gradients are 2 times what they should be in every parameter: as if not divided by dp_shard (2)"
    assert first_line(with_factors(trial, lambda rank, step, fqn: 2.0)) == told
    thrice = with_factors(trial, lambda rank, step, fqn: 1.0 + 2 * fqn.startswith("tok"))
    assert (
        first_line(thrice) == "gradients are 3 times what they should be in 1 of 11 parameters (tok_embeddings.weight)"
    )


# ---- in some steps


def test_a_factor_of_one_step_alone_is_told_from_one_that_stays() -> None:
    for steps, said, unsaid in (((2, 3), "from step 2 on", "alone"), ((2,), "in step 2 alone", "from step 2 on")):
        wrong = with_factors(fsdp_4(), lambda rank, step, fqn, steps=steps: 3.0 if step in steps else 1.0)
        line = first_line(wrong)
        assert "3 times" in line and "every parameter" in line
        assert said in line and unsaid not in line


def test_a_factor_that_changes_from_step_to_step_and_is_no_count_is_not_named() -> None:
    wrong = with_factors(fsdp_4(), lambda rank, step, fqn: (1.0, 3.0, 5.5)[step - 1])
    assert proposed(wrong) == []


def test_a_token_count_of_another_step() -> None:
    trial = fsdp_4()
    one = trial.reference.steps[0].valid_tokens
    expect_first(
        by_tokens(trial, lambda valid, size: valid / one),
        """gradients are right in step 1 and in step 2 1.375 times what they should be in every parameter: divided by the number of valid tokens of step 1 (16, not 22)""",
    )


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_that_are_not_zeroed(clipped: bool) -> None:
    trial = fsdp_4()
    norms = {step.step: min(1.0, 1.0 / (step.grad_norm + 1e-6)) if clipped else 1.0 for step in trial.reference.steps}
    for rank, evidence in trial.ranks.items():
        before = {fqn: norms[1] * gradient for fqn, gradient in evidence.steps[0].gradients.items()}
        total = {fqn: before[fqn] + gradient for fqn, gradient in evidence.steps[1].gradients.items()}
        trial = with_step(trial, rank, 2, gradients=total)
    told = "gradients are not zeroed before step 2 alone: those of step 2 hold step 1's as well"
    assert proposed(with_updates_that_follow(trial)) == [told]


def test_gradients_that_are_never_zeroed() -> None:
    trial = fsdp_4()
    for rank, evidence in trial.ranks.items():
        total: dict[str, np.ndarray] = {}
        for step in evidence.steps:
            total = {fqn: total.get(fqn, 0.0) + gradient for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=total)
    told = "gradients are not zeroed between steps: those of step 2 hold step 1's as well"
    assert first_line(with_updates_that_follow(trial)) == told


@pytest.mark.parametrize("clipped", [False, True])
def test_gradients_of_some_parameters_that_are_never_zeroed(clipped: bool) -> None:
    left: dict[str, np.ndarray] = {}

    def gradients(step: int, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        total = {fqn: g + left[fqn] if step > 1 and fqn in (NORM, LAST) else g for fqn, g in own.items()}
        norm = np.sqrt(sum(np.sum(g**2) for g in total.values()))
        left.update({fqn: min(1.0, 1.0 / (norm + 1e-6)) * g if clipped else g for fqn, g in total.items()})
        return total

    told = "gradients are not zeroed between steps in 2 of 12 parameters (norm.weight, output.weight): those of step 2 hold step 1's as well"
    assert first_line(trained_otherwise(fsdp_4(), gradients=gradients)) == told


def test_gradients_of_some_parameters_that_hold_others_of_the_step_before_are_zeroed() -> None:
    stale = fsdp_4().reference.steps[0].gradients

    def gradients(step: int, own: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {**own, NORM: own[NORM] + stale[NORM][::-1], LAST: own[LAST] + stale[LAST]} if step > 1 else own

    assert proposed(trained_otherwise(fsdp_4(), gradients=gradients)) == []


# ---- several factors


def test_gradients_scaled_more_often_in_some_buckets() -> None:
    early = (WQ, "tok_embeddings.weight")
    wrong = with_factors(
        trial_of(tiny_case("ddp_2")),
        lambda rank, step, fqn: 0.25 if fqn in early else 1.0 if fqn == LAST else 0.5,
    )
    expect_first(
        wrong,
        """gradients are scaled by different factors in 11 of 12 parameters (tok_embeddings.weight, layers.0.attention.wq.weight and 9 more): 0.25 (tok_embeddings.weight and 1 more), 0.5 (layers.0.attention.wk.weight and 8 more)""",
    )


def test_gradients_off_by_stage_are_told_with_each_stages_factor() -> None:
    trial = trial_of(tiny_case("single"))
    piped = replace(trial, case=tiny_case(ParallelDims(pp=2), schedule="1F1B", microbatches=4))
    halved = {fqn: 0.5 for fqn in trial.plan.shapes if fqn.startswith(("tok_embeddings", "layers.0"))}
    assert _by_stage(piped, halved) == "gradients are scaled by stage: 0.5 times in stage 0, 1 times in stage 1"
    assert _by_stage(piped, {WQ: 0.5}) == "", "not all of a stage"
    every = dict.fromkeys(trial.plan.shapes, 0.5)
    assert _by_stage(trial, halved) == _by_stage(trial, every) == "", "without a pipeline there are no stages"


def test_different_factors_in_a_later_step_are_told_with_it() -> None:
    factors = {LAST: 2.0, NORM: 4.0}
    wrong = with_factors(fsdp_4(), lambda rank, step, fqn: factors.get(fqn, 1.0) if step > 1 else 1.0)
    told = "from step 2 on gradients are scaled by different factors in 2 of 12 parameters (norm.weight, output.weight)"
    assert first_line(wrong) == f"{told}: 2 (output.weight), 4 (norm.weight)"


def test_replicas_with_other_factors_are_no_scaled_gradients() -> None:
    wrong = with_factors(trial_of(tiny_case("ddp_2")), lambda rank, step, fqn: 1.0 + rank)
    assert proposed(wrong) == []


def test_gradients_of_noise_are_no_multiple() -> None:
    trial, draw = fsdp_4(), np.random.default_rng(1)
    noise = {fqn: draw.standard_normal(shape) for fqn, shape in trial.plan.shapes.items()}
    assert proposed(with_step_1_gradients(trial, lambda _, fqn: reference_gradient(trial, fqn) + noise[fqn])) == []


# ---- clipped by another norm


def test_gradients_that_are_clipped_before_they_are_unscaled() -> None:
    training = replace(ADAMW, max_norm=0.25)

    def given(step: int, gradients: dict, norm: float, parameters: dict) -> dict:
        return {fqn: clip(norm, training) * gradient / 64 for fqn, gradient in gradients.items()}

    scale = lambda step, own: {fqn: 64 * gradient for fqn, gradient in own.items()}  # noqa: E731
    trial = trained_otherwise(trial_of(tiny_case("fsdp_2", training)), gradients=scale, given=given)
    told = "gradients are clipped when they are still 64 times what they should be, and divided by that afterwards"
    assert first_line(trial) == told


# ---- factors


def test_a_factor_is_named_within_a_millionth_and_one_of_1_is_no_factor() -> None:
    trial = trial_of(tiny_case(dims(shard=4)))
    assert factor_text(trial, 4 * (1 + 5e-7)) == ": as if not divided by dp_shard (4)"
    assert factor_text(trial, 4 * (1 + 5e-6)) == ""
    assert factor_text(trial, 1.0) == ""


def test_a_number_of_tokens_that_is_the_same_in_every_step_is_a_number_of_the_case() -> None:
    trial = trial_of(tiny_case("single"))
    steps = tuple(replace(step, valid_tokens=16) for step in trial.reference.steps)
    trial = replace(trial, reference=replace(trial.reference, steps=steps))
    assert factor_text(trial, 16) == ": as if not divided by the number of valid tokens (16)"
    assert factor_text(trial, 16, everywhere=False) == ""
    assert factor_text(trial, 0.5 * (1 + 5e-7)) == ": as if divided by the number of all tokens, not of the valid ones"
    assert not list(token_factors(trial, 1, 16))
