"""What is said beside a cause, and where one stops: small functions of harness/diagnose on literal evidence."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import (
    ADAMW,
    SGD,
    TINY,
    cause_of,
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_rank,
    with_step,
    with_step_1_gradients,
    without_rank,
)
from test_diagnose import NORM, dims, first_line, fsdp_4, ran_as, received
from test_diagnose_apart import broken, recomputing

from harness.diagnosis import _what_weaker_tests_say
from harness.diagnosis.data import wrong_weights
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.factors import factor_text
from harness.diagnosis.features import _compile, wrong_features
from harness.diagnosis.gradients import _less_than_planned, wrong_gradients
from harness.diagnosis.later import _what_may_be_kept, wrong_later_gradients
from harness.diagnosis.layout import Layout, _fsdp_over_tp, _name_partial, _part_text, _unreduced
from harness.diagnosis.pipeline import _others
from harness.diagnosis.processes import incomplete, process_failed
from harness.diagnosis.reshard import _other_policies, wrong_resharding, wrong_wrapper
from harness.diagnosis.rest import _reduced_too_often, not_deterministic, replicas_drift, wrong_reports
from harness.diagnosis.updates import _enlarged, _not_clipped, _wrong_lr
from harness.evidence.records import Exit
from harness.judge.result import Finding, Result, Verdict
from harness.judge.trial import Trial
from harness.spec.case import Case, Saved
from harness.spec.dims import ParallelDims

DDP_2 = trial_of(tiny_case("ddp_2"))


# ---- what weaker tests say


def said(*results: tuple[str, Verdict, str]) -> dict[str, str]:
    return dict(_what_weaker_tests_say([Result(name, verdict, 1, note=note) for name, verdict, note in results]))


def test_the_larger_difference_of_loss_and_gradients_is_told_as_a_number_not_as_a_word() -> None:
    loss, gradients = (
        ("loss", Verdict.PASS, "largest difference 3e-16"),
        ("gradients", Verdict.PASS, "largest difference 1e-15"),
    )
    update = ("update", Verdict.FAIL, "")
    assert said(loss, gradients, update) == {
        "loss, gradients": "equal to the reference within 1e-15: a loss-curve test passes here"
    }
    assert said(gradients, update) == {"gradients": "equal to the reference within 1e-15"}
    assert said(loss, gradients, ("golden", Verdict.FAIL, "")) == {}
    assert list(said(("golden", Verdict.FAIL, ""), update)) == ["golden"]


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


# ---- features


def test_what_was_compiled_as_asked_is_not_blamed() -> None:
    trial = trial_of(tiny_case("ddp_2", compile=True))
    assert _compile(trial) is None
    alone = with_rank(trial, 1, compiler={})
    assert _compile(alone) == "compile is requested, no block ran compiled on rank 1"
    assert _compile(replace(alone, case=DDP_2.case)) == "compiled code ran on rank 0, compile is not requested"


def test_up_to_four_blocks_are_told_and_none_is_told_as_none() -> None:
    five = trial_of(tiny_case("ddp_2", model=replace(TINY, n_layers=12), activation_checkpointing="layer"))
    for rank, evidence in five.ranks.items():
        for step in evidence.steps:
            calls = {key: 1 for key in step.activity.calls if key.startswith("forward")}
            again = {f"backward layers.{block}.ffn_norm": 1 for block in (0, 2, 4, 6, 8)}
            five = with_step(five, rank, step.step, activity=replace(step.activity, calls=calls | again))
    told = cause_of(wrong_features(five, broken("features"))).partition("recomputed are ")[2]
    assert told == (
        "layers.0, layers.2, layers.4, layers.6 and 1 more, requested layers.1, layers.11, layers.3, layers.5 and 2 more"
    )
    nothing = with_rank(recomputing(1), 1, steps=recomputing().ranks[1].steps)
    told = cause_of(wrong_features(nothing, broken("features"))).partition("recomputed are ")[2]
    assert told == "none, requested layers.1"


# ---- gradients


def test_a_gradient_is_as_wrong_as_the_law_says_relative_to_the_whole_parameter() -> None:
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


def test_two_parameters_that_are_wrong_on_one_rank_alone_are_told_with_it() -> None:
    def noisy(rank: int, fqn: str) -> np.ndarray:
        gradient = DDP_2.reference.steps[0].gradients[fqn]
        return np.cos(99 * gradient) if rank == 1 and fqn in (NORM, "output.weight") else gradient

    trial = with_step_1_gradients(DDP_2, noisy)
    found = wrong_gradients(trial, broken("gradients"))
    assert cause_of(found).startswith(
        "gradients are wrong in 2 of 12 parameters (norm.weight, output.weight) on rank 1:"
    )


def test_a_loss_and_gradients_off_by_little_are_told_with_both_numbers() -> None:
    full = DDP_2.reference.steps[0].gradients
    trial = with_step_1_gradients(DDP_2, lambda _, fqn: full[fqn] + 1e-8 * np.cos(99 * full[fqn]))
    for rank in trial.ranks:
        (batch,) = trial.ranks[rank].steps[0].microbatches
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, loss_sum=(1 + 3e-8) * batch.loss_sum),))
    told = "gradients are off by 1e-07 in every parameter, the loss of step 1 by 3e-08: as by arithmetic in float32"
    assert cause_of(wrong_gradients(trial, broken("gradients"))) == f"{told}, requested float64"


def test_rows_that_nobody_reduced_are_told_without_an_axis_where_no_axis_is_deaf_everywhere() -> None:
    assert _less_than_planned(DDP_2) == ""
    silent = with_collectives(DDP_2, 0, lambda call: [call] if call.phase != "backward" else [])
    assert _less_than_planned(silent) == ", a sum over dp_replicate"


def test_that_all_was_resumed_as_saved_is_said_only_where_that_was_seen() -> None:
    trial = trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()),)))
    for rank in (0, 1):
        seen = trial.ranks[rank].steps[0].gradients
        trial = with_step(trial, rank, 2, gradients=seen | {NORM: np.cos(99 * seen[NORM])})
    told = "gradients are wrong from step 2 on, the first after resuming, in 1 of 12 parameters (norm.weight)"
    saved = ": parameters, optimizer state and samples are those that were saved"
    assert cause_of(wrong_later_gradients(trial, broken("gradients"))) == told + saved
    trial = with_rank(trial, 0, resumed=None)
    assert cause_of(wrong_later_gradients(trial, broken("gradients"))) == told


def test_what_the_features_found_comes_before_what_numbers_make_one_think_of() -> None:
    trial = DDP_2
    for rank in trial.ranks:
        seen = trial.ranks[rank].steps[0].gradients
        trial = with_step(trial, rank, 1, gradients=seen | {NORM: np.cos(99 * seen[NORM])})
    found = Result("features", Verdict.FAIL, 1, (Finding("rank 0, step 1, matmuls in float32", "0", "2"),))
    told = cause_of(wrong_gradients(trial, broken("gradients") | {"features": found}))
    assert told.startswith(
        "features: rank 0, step 1, matmuls in float32: expected 0, observed 2; gradients are wrong in 1 of"
    )
    assert cause_of(wrong_gradients(trial, broken("gradients"))).startswith("gradients are wrong in 1 of")


def test_different_factors_in_a_later_step_are_told_with_it() -> None:
    trial = DDP_2
    for rank, evidence in trial.ranks.items():
        factors = {"output.weight": 2.0, NORM: 4.0}
        scaled = {f: factors.get(f, 1.0) * gradient for f, gradient in evidence.steps[1].gradients.items()}
        trial = with_step(trial, rank, 2, gradients=scaled)
    found = wrong_later_gradients(trial, broken("gradients"))
    told = "from step 2 on gradients are scaled by different factors in 2 of 12 parameters (norm.weight, output.weight)"
    assert cause_of(found).startswith(f"{told}: 2 (output.weight), 4 (norm.weight)")


@pytest.mark.parametrize(
    ("case", "told"),
    [
        (tiny_case("fsdp_2"), "gathered parameters"),
        (tiny_case("fsdp_2", wrapper="fsdp1"), "gathered parameters"),
        (tiny_case("ddp_2"), ""),
        (tiny_case("ddp_2", replace(ADAMW, document_mask=True)), "the document mask"),
        (
            tiny_case("fsdp_2", replace(ADAMW, variable_length=True)),
            "gathered parameters or what depends on the length",
        ),
    ],
)
def test_what_a_forward_pass_may_keep_is_what_there_is(case: Case, told: str) -> None:
    lines = (("not seen", f"whether it uses {told} of an earlier step"),) if told else ()
    assert _what_may_be_kept(replace(DDP_2, case=case)) == lines


# ---- layout


def test_a_part_that_is_nothing_or_all_is_told_as_such() -> None:
    trial = fsdp_4()
    assert _part_text(trial, NORM, ((0, 0),)) == "nothing"
    assert _part_text(trial, NORM, ((0, 4),)) == "all"
    assert _part_text(trial, NORM, ((1, 2),)) == "1/4 of dim 0 [1:2]"
    assert _part_text(trial, NORM, None) == "bytes that are nowhere in it"


def test_what_is_held_otherwise_by_some_parameters_only_is_named_by_what_was_left_out() -> None:
    trial, asked = ran_as(dims(shard=2, tp=2), dims(shard=2, tp=2)), dims(shard=2, tp=2)
    two = ["norm.weight", "output.weight"]
    where = "2 of 12 parameters (norm.weight, output.weight)"
    whole = "every rank of a group holds them whole"
    for layout, told in (
        (Layout(asked, sharded_by=()), f"FSDP is not applied to {where}: {whole}"),
        (Layout(asked, tensor_parallel=False), f"TP is not applied to {where}: {whole}"),
        (Layout(asked, sharded_by=("dp_shard", "tp")), f"{where} are sharded otherwise than all others"),
        (
            Layout(asked, order=("pp", "dp_replicate", "tp", "cp", "dp_shard")),
            f"{where} are cut by dp_shard first and by tp inside, requested tp first (strided shards)",
        ),
    ):
        assert _name_partial(layout, trial, two).cause == told


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        (dims(tp=2), "tp 2"),
        (dims(shard=2, tp=2), "2 and tp 2"),
        (dims(replicate=2, tp=2), "whole parameters on each of 2 ranks and tp 2"),
        (ParallelDims(dp_shard=2, cp=2, tp=2), "4 and tp 2"),
        (ParallelDims(cp=2, tp=2), "2 and tp 2"),
    ],
)
def test_what_was_asked_for_in_place_of_fsdp_over_tp(asked: ParallelDims, told: str) -> None:
    text = _fsdp_over_tp(Layout(asked, sharded_by=("dp_shard", "cp", "tp"), tensor_parallel=False))
    assert text.endswith(f", requested {told}")


def test_only_sums_of_gradients_in_backward_are_reductions() -> None:
    assert list(_unreduced(DDP_2, broken("gradients"))) == []
    for change in ({"phase": "forward"}, {"op": "all_gather"}, {"dtype": "int64"}):
        other = with_collectives(DDP_2, 0, lambda call, change=change: [replace(call, **change)])
        assert list(_unreduced(other, broken("gradients"))) == ["gradient reduction missing over dp_replicate"]
        assert list(_unreduced(other, broken("loss"))) == []


# ---- wrappers and what they free


def test_a_wrapper_is_blamed_only_where_one_is_there_and_features_are_wrong() -> None:
    asked = tiny_case("fsdp_2", wrapper="fsdp1")
    other = replace(trial_of(tiny_case("fsdp_2")), case=asked)
    assert cause_of(wrong_wrapper(other, broken("features"))) == "wrapper fsdp1 is requested, fsdp2 is observed"
    assert wrong_wrapper(other, broken("traffic")) is None
    assert wrong_wrapper(trial_of(tiny_case("fsdp_2")), broken("features")) is None
    bare = trial_of(tiny_case("single"))
    assert wrong_wrapper(bare, broken("features")) is None


def test_other_policies_are_the_three_words_and_what_divides_the_shards() -> None:
    shards = ParallelDims(dp_shard=8)
    assert list(_other_policies(tiny_case(shards))) == ["always", "never", 2, 4]
    assert list(_other_policies(tiny_case(shards, reshard_after_forward=2))) == ["default", "always", "never", 4]
    assert list(_other_policies(tiny_case(shards, wrapper="fsdp1"))) == ["always", "never"]


def test_a_model_that_is_one_unit_is_told_as_such() -> None:
    trial = trial_of(tiny_case("fsdp_2"), tiny_case("fsdp_2", reshard_after_forward="never"))
    for rank, evidence in trial.ranks.items():
        trial = with_rank(trial, rank, structure={"": next(iter(evidence.structure.values()))})
    assert cause_of(wrong_resharding(trial, broken("reshard"))) == (
        "after forward: tok_embeddings, layers.0 still gathered, should be freed: the whole model is one fsdp2 unit,"
        " no block is one of its own; reshard_after_forward default is requested, never is observed"
    )


# ---- pipeline


def test_other_schedules_are_tried_with_any_number_of_microbatches_the_right_one_first() -> None:
    case = tiny_case(ParallelDims(pp=2), schedule="1F1B", microbatches=4, model=replace(TINY, n_layers=2))
    tried = [(other.features.schedule, other.microbatches) for other in _others(case)]
    assert tried[:2] == [("GPipe", 4), ("1F1B", 4)]
    assert {number for name, number in tried if name == "GPipe"} == set(range(1, 9))


# ---- processes


def test_of_many_that_failed_four_are_told_and_of_a_stack_four_lines() -> None:
    stack = "\n".join(f"line {number}" for number in range(6))
    exits = tuple(Exit(rank, "killed", signal="SIGKILL", error="no answer", stack=stack) for rank in range(6))
    trial = fsdp_4()
    found = process_failed(replace(trial, run=replace(trial.run, exits=exits)), {})
    assert found is not None
    assert [label for label, _ in found.evidence] == [*(f"rank {rank}" for rank in range(4)), "stack", "", "", ""]
    assert [text for _, text in found.evidence[4:]] == [f"line {number}" for number in range(4)]


def test_steps_that_a_resumed_launch_left_out_are_told_with_those_it_was_asked_for() -> None:
    trial = trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()),)))
    short = with_rank(trial, 1, steps=trial.ranks[1].steps[:1])
    assert cause_of(incomplete(short, broken("completed"))) == "rank 1 trained steps 2 only, requested steps 2 to 3"


def test_how_a_rank_ended_is_told_without_its_full_stop_and_first_what_it_issued() -> None:
    def ended(error: str) -> str:
        exits = (Exit(0, "raised", 1, error=error, blamed=True), *DDP_2.run.exits[1:])
        return cause_of(process_failed(replace(DDP_2, run=replace(DDP_2.run, exits=exits)), {}))

    assert ended("ValueError: X.") == "rank 0 raised: ValueError: X"
    assert ended("lost; issued a; issued b") == "rank 0 issued a; issued b, then raised: lost"


def test_the_last_collectives_of_two_culprits_are_told() -> None:
    blamed = tuple(Exit(rank, "raised", 1, error="x", blamed=True, last_collective="all_gather") for rank in range(4))
    found = process_failed(replace(fsdp_4(), run=replace(fsdp_4().run, exits=blamed)), {})
    assert found is not None and found.evidence == (
        ("rank 0", "last collective all_gather"),
        ("rank 1", "last collective all_gather"),
    )


# ---- samples


def test_tokens_of_no_sample_on_all_ranks_are_another_order() -> None:
    trial = fsdp_4()
    for rank in trial.ranks:
        (batch,) = trial.ranks[rank].steps[0].microbatches
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, tokens=5 + (batch.tokens + rank) % 3),))
    assert first_line(trial).endswith(": another seed, order or data set")
    alone = with_step(fsdp_4(), 2, 1, microbatches=trial.ranks[2].steps[0].microbatches)
    assert first_line(alone).endswith("on rank 2")


def test_accumulation_left_out_of_one_step_is_told_with_it() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    ids = trial.reference.samples[1]
    for rank in (0, 1):
        trial = received(trial, rank, 2, list(ids[4 * rank : 4 * rank + 4]))
    assert first_line(trial) == "accumulation: rank 0 ran microbatches of [4] samples in step 2, requested [2, 2]"


def test_four_ranks_that_start_from_one_shard_are_told_by_the_first_two() -> None:
    trial = fsdp_4()
    for rank, evidence in trial.ranks.items():
        first = trial.ranks[0].parameters
        parameters = (replace(mine, value=one.value) for mine, one in zip(evidence.parameters, first, strict=True))
        trial = with_rank(trial, rank, parameters=tuple(parameters))
    told = "ranks along dp_shard start from the same shard: rank 1 holds the values of rank 0 in 9 of 12 parameters"
    assert cause_of(wrong_weights(trial, broken("initial_weights"))).startswith(told)


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
    assert _wrong_lr(late) == "learning rate of step 2 is 0.1234, requested 0.05 on rank 1"
    near = with_step(trial, 1, 2, lr=rate * (1 + 1e-10))
    assert _wrong_lr(near) == f"learning rate of step 2 is {rate:.6g}, requested 0.05 on rank 1"


# ---- the rest


def test_replicas_that_drift_beside_other_mistakes_are_not_explained_by_rounding() -> None:
    told = "within rounding of the reference"
    for laws, alone in ((("replica_agreement",), True), (("replica_agreement", "gradients"), False)):
        found = replicas_drift(DDP_2, broken(*laws))
        assert found is not None and any(told in text for _, text in found.evidence) == alone


def test_a_norm_that_nobody_shows_is_not_the_one_after_clipping() -> None:
    silent = with_step(DDP_2, 1, 2, grad_norm=None)
    for rank, step in ((0, 1), (0, 2), (0, 3), (1, 1), (1, 3)):
        silent = with_step(silent, rank, step, grad_norm=1.0)
    told = "rank 1 reports the gradient norm of steps 1, 3 only, that of step 2 is lacking"
    assert cause_of(wrong_reports(silent, broken("grad_norm"))) == told


def test_a_repeat_that_lacks_a_rank_is_fed_other_samples_there() -> None:
    trial = trial_of(tiny_case("ddp_2", runs=2))
    trial = replace(trial, repeat=without_rank(trial, 1).run)
    told = "for the repeat receives other samples (rank 1, step 1)"
    assert told in cause_of(not_deterministic(trial, broken("determinism")))


@pytest.mark.parametrize("law", ["loss", "gradients", "update"])
def test_a_display_is_not_blamed_where_the_training_is_wrong(law: str) -> None:
    wrong = with_step(DDP_2, 1, 2, grad_norm=3.0)
    assert wrong_reports(wrong, broken("grad_norm")) is not None
    assert wrong_reports(wrong, broken("grad_norm", law)) is None


def test_reductions_after_every_microbatch_are_counted_on_rank_0_and_there_must_be_some() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))

    def often(trial: Trial, rank: int) -> Trial:
        return with_collectives(trial, rank, lambda call: [call] * (2 if call.phase == "backward" else 1))

    told = "gradients are reduced after every microbatch (2 times a step), once a step is requested"
    assert _reduced_too_often(often(trial, 0)) == told
    assert _reduced_too_often(often(trial, 1)) is None
    assert _reduced_too_often(trial_of(tiny_case("single", accumulation=2))) is None
    assert _reduced_too_often(often(DDP_2, 0)) is None
