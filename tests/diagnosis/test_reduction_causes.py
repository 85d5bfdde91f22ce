"""Gradients that are not reduced, or are scaled by a factor, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    DDP_2,
    LAST,
    NORM,
    dims,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    gradients_of,
    reference_gradient,
    scaled,
    with_own_samples,
)
from literal import (
    tiny_case,
    trial_of,
    with_collectives,
    with_rank,
    with_step,
    with_step_1_gradients,
    with_updates_that_follow,
    with_value,
)

from harness.diagnosis.factors import factor_text
from harness.diagnosis.gradients import (
    _less_than_planned,
    _missing_reduction,
    _scaled_by_stage,
)
from harness.spec.dims import ParallelDims

# ---- gradients


def test_gradient_reduction_missing_over_dp_replicate() -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    expect(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("all_reduce",)),
        """\
gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3]
  gradients: rank 0, step 1, tok_embeddings.weight: 3.24 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2.528 times the reference's by best fit
  samples: rank 0's gradient holds those received by ranks [0,1], expected [0-3]
  samples: rank 1's gradient holds those received by ranks [0,1], expected [0-3]
  traffic: gradients: all_reduce over dp_replicate in backward: expected 944 B per step, observed 0 B
  loss: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_gradient_reduction_missing_over_dp_shard() -> None:
    heard = {0: [0, 2], 1: [1, 3], 2: [0, 2], 3: [1, 3]}
    expect_first(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("reduce_scatter",)),
        """gradient reduction missing over dp_shard: no reduce_scatter ran over [0,1] [2,3]""",
    )


def test_gradient_reduction_missing_over_both_axes() -> None:
    heard = {rank: [rank] for rank in range(4)}
    trial = with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ("reduce_scatter", "all_reduce"))
    expect_first(
        trial,
        """gradient reduction missing over dp_shard and dp_replicate: no reduce_scatter ran over [0,1] [2,3], no all_reduce ran over [0,2] [1,3]""",
    )


def test_a_reduction_whose_result_is_dropped() -> None:
    heard = {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}
    expect(
        with_own_samples(trial_of(tiny_case("hsdp_2x2")), heard, ()),
        """\
gradient reduction without effect over dp_replicate: rank 0's gradient holds the samples of ranks [0,1] only, though collectives ran
  gradients: rank 0, step 1, tok_embeddings.weight: 3.24 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2.528 times the reference's by best fit
  samples: rank 0's gradient holds those received by ranks [0,1], expected [0-3]
  samples: rank 1's gradient holds those received by ranks [0,1], expected [0-3]
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_norm_gradients_not_summed_over_tp() -> None:
    trial = trial_of(tiny_case("tp_2"))

    def share(rank: int, fqn: str) -> np.ndarray:
        whole = reference_gradient(trial, fqn)
        part = np.linspace(0.2, 0.7, whole.size).reshape(whole.shape)
        return whole if "norm" not in fqn else whole * (part if rank == 0 else 1 - part)

    expect(
        with_step_1_gradients(trial, share),
        """\
gradients of norm weights are not summed over tp: 3 parameters wrong, all others right
  why: with sequence parallel each tp rank's norms see their part of the sequence; the sum over tp is missing
  gradients: rank 0, step 1, layers.0.attention_norm.weight: 0.4725 times the reference's by best fit
  gradients: rank 1, step 1, layers.0.attention_norm.weight: 0.5275 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_norm_gradients_averaged_over_tp() -> None:
    trial = trial_of(tiny_case("tp_2"))
    trial = with_step_1_gradients(
        trial, lambda _, fqn: reference_gradient(trial, fqn) * (0.5 if "norm" in fqn else 1.0)
    )
    expect_first(
        trial,
        """gradients are 0.5 times what they should be in 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more): divided by tp (1/2) once too often""",
    )


ALL = "divided by the number of all tokens, not of the valid ones"  # half of the literal tokens are valid


@pytest.mark.parametrize(
    ("layout", "features", "factor", "name"),
    [
        (dims(shard=4), {}, 1 / 4, "divided by dp_shard (1/4) once too often"),
        (dims(shard=4), {}, 4, "not divided by dp_shard (4)"),
        (dims(replicate=2), {}, 1 / 2, f"divided by dp_replicate (1/2) once too often, or {ALL}"),
        (dims(replicate=2), {}, 2, "not divided by dp_replicate (2)"),
        (dims(2, 4), {}, 1 / 8, "divided by dp_replicate x dp_shard or the number of samples (1/8) once too often"),
        (dims(2, 4), {}, 8, "not divided by dp_replicate x dp_shard or the number of samples (8)"),
        (dims(2, 4), {}, 4, "not divided by dp_shard (4)"),
        (dims(2, 2), {}, 2, "not divided by dp_replicate or dp_shard (2)"),
        (dims(1, 2, 2), {}, 1 / 2, f"divided by dp_shard or tp (1/2) once too often, or {ALL}"),
        (dims(tp=2), {}, 2, "not divided by tp (2)"),
        (dims(1, 4), {"accumulation": 2}, 2, "not divided by accumulation (2)"),
        (dims(1, 4), {"accumulation": 2}, 1 / 8, "divided by dp_shard x accumulation or the number of samples (1/8) once too often"),
        (dims(1, 4), {}, "valid", "not divided by the number of valid tokens ({})"),
        (dims(1, 4), {}, "1/valid", "divided by the number of valid tokens (1/{}) once too often"),
        (dims(1, 4), {}, "valid/all", ALL),
        (dims(1, 4), {}, -1, "the sign is wrong"),
        (dims(1, 4), {}, 1.7, ""),
    ],
)  # fmt: skip
def test_a_factor_is_named_by_the_number_of_the_case_that_it_is(layout, features, factor, name) -> None:
    valid = trial_of(tiny_case(layout, **features)).reference.steps[0].valid_tokens
    factor = {"valid": valid, "1/valid": 1 / valid, "valid/all": valid / 32}.get(factor, factor)
    tail = f": {name.format(valid)}" if name else ""
    trial = scaled(layout, factor, **features)
    assert first_line(trial) == f"gradients are {factor:.6g} times what they should be in every parameter{tail}"


def test_gradients_twice_too_large_show_a_number_to_check() -> None:
    expect(
        scaled("fsdp_2", 2.0),
        """\
gradients are 2 times what they should be in every parameter: not divided by dp_shard (2)
  gradients: rank 0, step 1, tok_embeddings.weight: 2 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: 2 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_gradients_that_are_zero() -> None:
    expect_first(scaled("fsdp_2", 0.0), """gradients are zero in every parameter""")


def test_one_parameter_scaled_on_one_rank() -> None:
    trial = fsdp_4()
    trial = with_updates_that_follow(with_value(trial, 2, 1, "gradients", NORM, lambda g: 3 * g))
    expect_first(trial, """gradients are 3 times what they should be in 1 of 12 parameters (norm.weight) on rank 2""")


PP_2 = tiny_case(ParallelDims(pp=2), schedule="1F1B", microbatches=4)


def test_gradients_off_by_stage_are_told_with_each_stages_factor() -> None:
    trial = trial_of(tiny_case("single"))
    first = ("tok_embeddings", "layers.0")
    halved = with_step_1_gradients(
        trial, lambda _, fqn: reference_gradient(trial, fqn) * (0.5 if fqn.startswith(first) else 1.0)
    )
    wrong = [(0, fqn) for fqn in trial.plan.shapes if fqn.startswith(first)]
    told = _scaled_by_stage(replace(halved, case=PP_2), wrong)
    assert told is not None and told.startswith(
        "gradients are off by stage, times 0.5 in stage 0, 1 in stage 1: what a stage sends back"
    )
    assert _scaled_by_stage(halved, wrong) is None, "without a pipeline there are no stages"
    noise = with_step_1_gradients(trial, lambda _, fqn: reference_gradient(trial, fqn) ** 2)
    assert _scaled_by_stage(replace(noise, case=PP_2), wrong) is None, "no multiple"


def test_a_reduction_over_other_groups_than_any_axis_names_them() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    partners = {(0, 2): (0, 3), (1, 3): (1, 2)}
    for rank, evidence in trial.ranks.items():
        calls = tuple(
            replace(call, ranks=partners.get(call.ranks, call.ranks) if call.phase == "backward" else call.ranks)
            for call in evidence.collectives
        )
        trial = with_rank(trial, rank, collectives=calls)
    trial = with_step_1_gradients(trial, lambda rank, fqn: reference_gradient(trial, fqn) + rank)
    assert _missing_reduction(trial, []) == (
        "gradient reduction missing over dp_replicate: no all_reduce ran over [0,2] [1,3], but over [0,3] [1,2]"
    )


EARLY = ("layers.0.attention.wq.weight", "tok_embeddings.weight")


def test_gradients_scaled_more_often_in_some_buckets() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    factors = {fqn: 0.25 if fqn in EARLY else 0.5 for fqn in trial.plan.shapes if fqn != LAST}
    trial = with_step_1_gradients(trial, lambda _, fqn: factors.get(fqn, 1.0) * reference_gradient(trial, fqn))
    expect_first(
        trial,
        """gradients are scaled by different factors in 11 of 12 parameters (tok_embeddings.weight, layers.0.attention.wq.weight and 9 more): 0.25 (tok_embeddings.weight and 1 more), 0.5 (layers.0.attention.wk.weight and 8 more): some are scaled more often than others, by bucket, by stage or by wrapper""",
    )


def test_a_reduction_over_groups_of_no_axis() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    partners = {(0, 2): (0, 3), (1, 3): (1, 2)}

    def gradient(rank: int, fqn: str) -> np.ndarray:
        return reference_gradient(trial, fqn) + rank

    trial = with_step_1_gradients(trial, gradient)
    for rank in trial.ranks:
        trial = with_collectives(trial, rank, lambda c: (replace(c, ranks=partners.get(c.ranks, c.ranks)),))
    expect_first(
        trial,
        """ranks of a group do not issue the same collectives: group [0,3], collective 0: rank 3: nothing, every rank: all_reduce of 8 B float64 (step 1, backward)""",
    )


def test_gradients_wrong_in_one_group_only() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    expect_first(
        with_step_1_gradients(
            trial, lambda rank, fqn: wrong[fqn] if rank in (1, 3) else reference_gradient(trial, fqn)
        ),
        """gradients are wrong in every parameter on ranks [1,3], one group of dp_replicate: its members reduce different tensors with each other, in another order or not all, or one of them passes a wrong one""",
    )


def test_a_loss_whose_normaliser_counts_logits_tp_times() -> None:
    trial = trial_of(tiny_case("tp_2"))
    noise = np.random.default_rng(1)
    wrong = {fqn: full + 0.1 * noise.standard_normal(full.shape) for fqn, full in gradients_of(trial).items()}
    trial = with_step_1_gradients(trial, lambda _, fqn: wrong[fqn])
    for rank, evidence in trial.ranks.items():
        parts = evidence.steps[0].microbatches
        parts = tuple(replace(p, loss_sum=p.loss_sum + np.log(2) * p.valid_tokens) for p in parts)
        trial = with_step(trial, rank, 1, microbatches=parts)
    expect_first(
        trial,
        """the loss of step 1 is too large by 0.693147 a token, the logarithm of tp 2: its normaliser counts each logit once for every rank along tp""",
    )


# ---- factors


def test_a_factor_is_named_within_a_millionth_and_one_of_1_is_no_factor() -> None:
    trial = trial_of(tiny_case(dims(shard=4)))
    assert factor_text(trial, 4 * (1 + 5e-7)) == ": not divided by dp_shard (4)"
    assert factor_text(trial, 4 * (1 + 5e-6)) == ""
    assert factor_text(trial, 1.0) == ""
    labels = np.abs(trial.reference.labels)
    steps = [replace(step, valid_tokens=32) for step in trial.reference.steps]
    assert factor_text(replace(trial, reference=replace(trial.reference, labels=labels, steps=tuple(steps))), 1.0) == ""


def test_a_number_of_tokens_is_named_only_of_what_is_everywhere() -> None:
    trial = trial_of(tiny_case("single"))
    valid = trial.reference.steps[0].valid_tokens
    assert factor_text(trial, valid) == f": not divided by the number of valid tokens ({valid})"
    assert factor_text(trial, valid, everywhere=False) == ""
    all_tokens = ": divided by the number of all tokens, not of the valid ones"
    assert factor_text(trial, valid / 32 * (1 + 5e-7)) == all_tokens
    assert factor_text(trial, valid / 32, everywhere=False) == ""


# ---- gradients


def test_rows_that_nobody_reduced_are_told_without_an_axis_where_no_axis_is_deaf_everywhere() -> None:
    assert _less_than_planned(DDP_2) == ""
    silent = with_collectives(DDP_2, 0, lambda call: [call] if call.phase != "backward" else [])
    assert _less_than_planned(silent) == ", a sum over dp_replicate"
