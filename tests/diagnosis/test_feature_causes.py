"""Features, wrappers, schedules and memory that are not as requested, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosed import DDP_2, broken, expect_first, first_line
from literal import (
    TINY,
    cause_of,
    tiny_case,
    trial_of,
    with_rank,
    with_step,
)

from harness.diagnosis.features import _compile, wrong_features, wrong_masks
from harness.diagnosis.pipeline import _others
from harness.diagnosis.reshard import _other_policies, wrong_resharding, wrong_wrapper
from harness.evidence.records import Call, HeldTensor
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

# ---- the rest


@pytest.mark.parametrize(
    ("layout", "key", "asked", "ran"),
    [
        ("tp_2", "sequence_parallel", True, False),
        ("tp_2", "sequence_parallel", False, True),
        ("fsdp_2_tp_2", "loss_parallel", True, False),
        ("fsdp_2_tp_2", "loss_parallel", False, True),
    ],
)
def test_a_feature_that_is_not_in_force(layout, key, asked, ran) -> None:
    trial = trial_of(tiny_case(layout, **{key: asked}), tiny_case(layout, **{key: ran}))
    assert first_line(trial) == f"{key} {asked} is requested, {ran} is observed: its traffic is what was seen"


@pytest.mark.parametrize(
    ("asked", "ran", "units"),
    [
        ("always", "never", "tok_embeddings, layers.0, norm and 1 more still gathered, should be freed"),
        ("never", "default", "tok_embeddings, layers.0 freed, should be gathered"),
    ],
)
def test_what_stays_gathered_is_named_with_the_policy_in_force(asked: str, ran: str, units: str) -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=policy) for policy in (asked, ran)))
    told = f"after forward: {units}; reshard_after_forward {asked} is requested, {ran} is observed"
    assert first_line(trial) == told


def test_parameters_kept_gathered_after_the_step() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[2].memory | {"parameters": 1888}
    expect_first(
        with_step(trial, 1, 3, memory=memory),
        """memory held between steps is not the plan's: rank 1, step 3, parameters: expected 944 B, observed 1.888 kB""",
    )


THREE = replace(TINY, n_layers=3)


# ---- features


def recomputing(*blocks: int, asked: str = "layer") -> Trial:
    """Three blocks, of which these are called inside backward."""
    trial = trial_of(tiny_case("ddp_2", model=THREE, activation_checkpointing=asked))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            forward = {key: count for key, count in step.activity.calls.items() if key.phase == "forward"}
            again = {Call("backward", f"layers.{block}.ffn_norm"): 1 for block in blocks}
            trial = with_step(trial, rank, step.step, activity=replace(step.activity, calls=forward | again))
    return trial


def test_blocks_recomputed_in_the_place_of_others_are_named_beside_those_asked_for() -> None:
    told = "activation checkpointing layer is in the wrong place: recomputed are"
    assert (
        cause_of(wrong_features(recomputing(0, 2), broken("features")))
        == f"{told} layers.0, layers.2, requested layers.1"
    )
    assert cause_of(wrong_features(recomputing(2), broken("features"))) == f"{told} layers.2, requested layers.1"


def test_a_rank_that_recomputes_other_blocks_than_its_peers_is_named() -> None:
    trial, odd = recomputing(1), recomputing(0)
    trial = with_rank(trial, 1, steps=odd.ranks[1].steps)
    assert cause_of(wrong_features(trial, broken("features"))) == (
        "activation checkpointing layer is in the wrong place on rank 1: recomputed are layers.0, requested layers.1"
    )


def test_masks_are_blamed_only_where_random_numbers_were_drawn_again_and_gradients_are_wrong() -> None:
    case = tiny_case("single", model=replace(TINY, dropout=0.1), activation_checkpointing="full")
    trial = trial_of(case)
    (first, *_) = trial.ranks[0].steps

    def drawing(random: dict[str, int], *other_states: str) -> Trial:
        activity = replace(first.activity, random=random, other_states=dict.fromkeys(other_states, 1))
        return with_step(trial, 0, 2, activity=activity)

    other = drawing({"forward": 2, "backward": 2}, "layers.0", "layers.0.attention")
    told = "recomputation of layers.0 began with another random state than forward: its masks are not those that the loss was computed with"
    assert cause_of(wrong_masks(other, broken("gradients"))) == told
    assert wrong_masks(other, broken("features")) is None
    assert wrong_masks(drawing({"forward": 2}, "layers.0"), broken("gradients")) is None
    assert wrong_masks(drawing({"forward": 2, "backward": 2}), broken("gradients")) is None


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
            calls = {key: 1 for key in step.activity.calls if key.phase == "forward"}
            again = {Call("backward", f"layers.{block}.ffn_norm"): 1 for block in (0, 2, 4, 6, 8)}
            five = with_step(five, rank, step.step, activity=replace(step.activity, calls=calls | again))
    told = cause_of(wrong_features(five, broken("features"))).partition("recomputed are ")[2]
    assert told == (
        "layers.0, layers.2, layers.4, layers.6 and 1 more, requested layers.1, layers.11, layers.3, layers.5 and 2 more"
    )
    nothing = with_rank(recomputing(1), 1, steps=recomputing().ranks[1].steps)
    told = cause_of(wrong_features(nothing, broken("features"))).partition("recomputed are ")[2]
    assert told == "none, requested layers.1"


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


# ---- what is kept


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (((8, 4), (4, 4)), "whole parameters"),
        (((4, 4), (2, 4)), "its slices"),
        (((300,),), "no parameter's shape"),
    ],
)
def test_copies_are_told_by_whose_shapes_they_have(shapes: tuple[tuple[int, ...], ...], told: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    held = tuple(HeldTensor(shape, "float32", 600) for shape in shapes)
    line = first_line(with_rank(trial, 1, held=held))
    size = "600 B" if len(shapes) == 1 else "1.2 kB"
    kept = f"{size} of float32 are retained in unaccounted tensors on rank 1"
    assert line.startswith(kept) and line.endswith(told)
