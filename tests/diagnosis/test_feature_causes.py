"""Features, wrappers, schedules and memory that are not as requested, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import pytest
from diagnosed import (
    DDP_2,
    broken,
    diagnosis_text,
    expect_first,
    first_line,
    here,
    proposed,
    seen,
    seen_text,
)
from literal import (
    TINY,
    tiny_case,
    trial_of,
    with_rank,
    with_step,
)

from harness.diagnosis.assume import another_case
from harness.diagnosis.backward import random_state_not_restored
from harness.diagnosis.differences import OF_GRADIENTS
from harness.diagnosis.features import (
    _compile,
    _in_words,
    _of_parts,
    _unlike_others,
    odd_traces,
    other_features,
    sent_in_another_dtype,
)
from harness.diagnosis.hypothesis import NOT_TESTED
from harness.diagnosis.units import _other_policies, _with_the_root, other_units
from harness.evidence.records import Collective, HeldTensor, Wrapper
from harness.evidence.step import Call
from harness.judge.finding import Finding
from harness.judge.trial import Trial
from harness.plan.stages import actions_of_rank
from harness.report.cause_text import cause_line
from harness.spec.case import Case
from harness.spec.dims import ParallelDims

# ---- the rest


@pytest.mark.parametrize(
    ("layout", "key", "requested", "ran"),
    [
        ("tp_2", "sequence_parallel", True, False),
        ("tp_2", "sequence_parallel", False, True),
        ("fsdp_2_tp_2", "loss_parallel", True, False),
        ("fsdp_2_tp_2", "loss_parallel", False, True),
    ],
)
def test_a_feature_that_is_not_in_force(layout, key, requested, ran) -> None:
    trial = trial_of(tiny_case(layout, **{key: requested}), tiny_case(layout, **{key: ran}))
    assert first_line(trial) == f"{key} {requested} is requested, {ran} is observed"


@pytest.mark.parametrize(
    ("requested", "ran", "units"),
    [
        ("always", "never", "tok_embeddings, layers.0, norm and 1 more still gathered, should be freed"),
        ("never", "default", "tok_embeddings, layers.0 freed, should be gathered"),
    ],
)
def test_what_stays_gathered_is_named_with_the_policy_in_force(requested: str, ran: str, units: str) -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=policy) for policy in (requested, ran)))
    told = f"after forward: {units}; reshard_after_forward {requested} is requested, {ran} is observed"
    assert first_line(trial) == told


def test_parameters_kept_gathered_after_the_step() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    memory = trial.ranks[1].steps[2].memory | {"parameters": 1888}
    expect_first(
        with_step(trial, 1, 3, memory=memory),
        """memory held between steps differs from the plan: rank 1, step 3, parameters: expected 944 B, observed 1.888 kB (1888)""",
    )


@pytest.mark.parametrize("checks", [("gradients",), ("traffic", "schedule")])
def test_no_feature_is_put_to_the_test_whose_traces_are_not_there(checks: tuple[str, ...]) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    noisy = with_rank(trial, 0, collectives=trial.ranks[0].collectives[::2])
    assert proposed(other_features, noisy, *checks) == []


THREE = replace(TINY, n_layers=3)


# ---- features


def recomputing(*blocks: int, requested: str = "layer") -> Trial:
    """Three blocks, of which these are called inside backward."""
    trial = trial_of(tiny_case("ddp_2", model=THREE, activation_checkpointing=requested))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            forward = {key: count for key, count in step.activity.calls.items() if key.phase == "forward"}
            again = {Call("backward", f"layers.{block}.ffn_norm"): 1 for block in blocks}
            trial = with_step(trial, rank, step.step, activity=replace(step.activity, calls=forward | again))
    return trial


def test_blocks_recomputed_in_the_place_of_others_are_named_beside_those_requested() -> None:
    told = "activation checkpointing layer recomputes the wrong blocks:"
    assert seen_text(odd_traces, recomputing(0, 2), "features") == f"{told} layers.0, layers.2, requested layers.1"
    assert seen_text(odd_traces, recomputing(2), "features") == f"{told} layers.2, requested layers.1"


def test_a_rank_that_recomputes_other_blocks_than_its_peers_is_named() -> None:
    trial, odd = recomputing(1), recomputing(0)
    trial = with_rank(trial, 1, steps=odd.ranks[1].steps)
    assert seen_text(odd_traces, trial, "features") == (
        "activation checkpointing layer recomputes the wrong blocks on rank 1: layers.0, requested layers.1"
    )


def test_the_part_of_each_block_that_alone_is_recomputed_is_told() -> None:
    trial = trial_of(tiny_case("ddp_2", model=THREE, activation_checkpointing="full"))

    def told(*called: str) -> str:
        calls = {Call("backward", f"layers.{block}{part}"): 1 for block in range(3) for part in called}
        activity = replace(trial.ranks[1].steps[0].activity, calls=calls)
        return _of_parts(with_step(trial, 1, 1, activity=activity), Finding.at(1, "12", "6", step=1))

    assert told(".attention", ".attention.wq") == ", of attention alone,"
    assert told("", ".attention") == told(".attention", ".feed_forward") == told() == ""


def test_units_that_the_mixed_precision_policy_was_not_passed_to_are_told() -> None:
    trial = trial_of(tiny_case("fsdp_2"))

    def casts_to(unit: Wrapper) -> str:
        return unit.casts_to

    def told(**casts: str) -> str:
        units = {name: Wrapper("fsdp2", (0, 1), casts_to=dtype) for name, dtype in casts.items()}
        return _unlike_others(
            with_rank(trial, 0, structure={**units, "other": Wrapper("ddp")}), "bfloat16", "param_dtype", casts_to
        )

    odd = "FSDP units first, second have no param_dtype, others bfloat16"
    assert told(root="bfloat16", first="", second="") == f": {odd}"
    assert told(first="bfloat16") == told(first="", second="") == ""


def test_masks_are_blamed_only_where_random_numbers_were_drawn_again_and_gradients_are_wrong() -> None:
    case = tiny_case("single", model=replace(TINY, dropout=0.1), activation_checkpointing="full")
    trial = trial_of(case)
    (first, *_) = trial.ranks[0].steps

    def drawing(random: dict[str, int], *other_states: str) -> Trial:
        activity = replace(first.activity, random=random, other_states=dict.fromkeys(other_states, 1))
        return with_step(trial, 0, 2, activity=activity)

    other = drawing({"forward": 2, "backward": 2}, "layers.0", "layers.0.attention")
    told = "recomputation of layers.0 starts from another random state than forward: its dropout masks differ from those of the loss"
    assert seen_text(random_state_not_restored, other, "gradients") == told
    assert not seen_text(random_state_not_restored, other, "features")
    assert not seen_text(random_state_not_restored, drawing({"forward": 2}, "layers.0"), "gradients")
    assert not seen_text(random_state_not_restored, drawing({"forward": 2, "backward": 2}), "gradients")


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
    told = seen_text(odd_traces, five, "features").partition("wrong blocks: ")[2]
    assert told == (
        "layers.0, layers.2, layers.4, layers.6 and 1 more, requested layers.1, layers.11, layers.3, layers.5 and 2 more"
    )
    nothing = with_rank(recomputing(1), 1, steps=recomputing().ranks[1].steps)
    told = seen_text(odd_traces, nothing, "features").partition("wrong blocks on rank 1: ")[2]
    assert told == "none, requested layers.1"


# ---- wrappers and what they free


def test_a_wrapper_is_blamed_only_where_one_is_there_and_features_are_wrong() -> None:
    requested = tiny_case("fsdp_2", wrapper="fsdp1")
    other = replace(trial_of(tiny_case("fsdp_2")), case=requested)
    assert seen_text(odd_traces, other, "features") == "wrapper fsdp1 is requested, fsdp2 is observed"
    assert not seen_text(odd_traces, other, "traffic")
    assert not seen_text(odd_traces, trial_of(tiny_case("fsdp_2")), "features")
    assert not seen_text(odd_traces, trial_of(tiny_case("single")), "features")


def test_another_wrapper_is_named() -> None:
    trial = trial_of(*(tiny_case("ddp_2", wrapper=wrapper) for wrapper in ("ddp", "replicate")))
    told, proof = diagnosis_text(trial).splitlines()[:2]
    assert (told, proof.strip()) == (
        "wrapper ddp is requested, replicate is observed",
        "assuming this: 2 of 2 failing checks pass, and no passing check fails",
    )


def test_other_policies_are_the_three_words_and_what_divides_the_shards() -> None:
    shards = ParallelDims(dp_shard=8)
    assert list(_other_policies(trial_of(tiny_case(shards)))) == ["always", "never", 2, 4]
    assert list(_other_policies(trial_of(tiny_case(shards, reshard_after_forward=2)))) == [
        "default",
        "always",
        "never",
        4,
    ]
    assert list(_other_policies(trial_of(tiny_case(shards, wrapper="fsdp1")))) == ["always", "never"]


def with_units(trial: Trial, *units: tuple[str, ...]) -> Trial:
    """Claimed by every rank, each with what is kept of its first parameter by the plan."""
    for rank, evidence in trial.ranks.items():
        wrappers = {fqn: wrapper for wrapper in evidence.structure.values() for fqn in wrapper.parameters}
        structure = {unit[0]: replace(wrappers[unit[0]], parameters=unit) for unit in units}
        trial = with_rank(trial, rank, structure=structure)
    return trial


def test_a_model_that_is_one_unit_is_told_as_such() -> None:
    trial = trial_of(tiny_case("fsdp_2"), tiny_case("fsdp_2", reshard_after_forward="never"))
    names = tuple(trial.plan.shapes)
    assert first_line(with_units(trial, names)) == (
        "the whole model is one fsdp2 unit: parameters are gathered in 1 piece, requested 3"
    )


def test_a_block_that_is_no_unit_of_its_own_is_named_with_what_it_is_gathered_with() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    first, block, last = trial.plan.units[0]
    assert first_line(with_units(trial, (*first, *block), last)).startswith(
        "fsdp2 units differ from those requested: tok_embeddings, layers.0 are gathered together,"
        " parameters are gathered in 2 pieces, requested 3"
    )


def test_a_block_that_is_left_to_the_root_is_named() -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=policy) for policy in ("default", "never")))
    first, block, last = trial.plan.units[0]
    for rank, evidence in trial.ranks.items():
        claims = {wrapper.parameters: wrapper for wrapper in evidence.structure.values()}
        structure = {"tok_embeddings": claims[first], "": claims[block], "norm": claims[last]}
        trial = with_rank(trial, rank, structure=structure)
    found = proposed(other_units, trial, "placements")
    assert found == ["layers.0 is no unit of its own, it is gathered with the root"]


def test_an_embedding_that_is_left_to_the_root_is_named_if_it_should_be_freed() -> None:
    freed, kept = (trial_of(tiny_case("fsdp_2", reshard_after_forward=policy)) for policy in ("always", "never"))
    first, block, last = freed.plan.units[0]

    def told(trial: Trial) -> str:
        for rank, evidence in trial.ranks.items():
            claims = {wrapper.parameters: wrapper for wrapper in evidence.structure.values()}
            structure = {"": claims[first], "layers.0": claims[block], "norm": claims[last]}
            trial = with_rank(trial, rank, structure=structure)
        return _with_the_root(trial)

    assert told(freed) == "tok_embeddings is no unit of its own, it is gathered with the root"
    assert told(kept) == ""


def test_what_stages_send_in_another_dtype_is_named() -> None:
    trial = replace(trial_of(tiny_case("fsdp_2")), case=tiny_case(ParallelDims(pp=2)))

    def sending(*dtypes: str, op: str = "send", phase: str = "pipeline") -> Trial:
        sent = [Collective(op, (0, 1), "pp", dtype, 512, phase, 1, i) for i, dtype in enumerate(dtypes)]
        return with_rank(trial, 0, collectives=(*sent,))

    for op in ("send", "recv"):
        found = seen(sent_in_another_dtype, sending("bfloat16", "int64", op=op), "traffic")
        assert found is not None
        assert cause_line(found.cause) == "activations pass between pipeline stages in bfloat16, requested float64"
        assert found.checks == ("traffic", *OF_GRADIENTS)
        assert found.lines == (here("traffic"), *NOT_TESTED)
    for right in (sending("float64"), sending("bfloat16", "float64"), sending()):
        assert not seen_text(sent_in_another_dtype, right, "traffic")
    for other in (sending("bfloat16", op="all_reduce"), sending("bfloat16", phase="forward")):
        assert not seen_text(sent_in_another_dtype, other, "traffic")
    assert not seen_text(sent_in_another_dtype, sending("bfloat16"), "gradients")
    computing = replace(trial.case, training=replace(trial.case.training, compute_dtype="bfloat16"))
    assert not seen_text(sent_in_another_dtype, replace(sending("bfloat16"), case=computing), "traffic")


@pytest.mark.parametrize(
    ("key", "requested", "ran", "told"),
    [
        (
            "defer_sync",
            True,
            False,
            "gradients are reduced after every microbatch (4 times a step), requested once a step",
        ),
        (
            "defer_sync",
            True,
            "all_reduce",
            "gradients are reduced over dp_shard after every microbatch (4 times a step), requested once a step",
        ),
        ("defer_sync", False, True, "defer_sync False is requested, True is observed"),
        ("reduce_dtype", "float32", "bfloat16", "gradients are reduced in bfloat16, requested float32"),
        ("activation_checkpointing", "full", "none", "activation checkpointing full is requested, none took place"),
        ("activation_checkpointing", "full", "op", "activation checkpointing full is requested, op is observed"),
        ("quantize", "float8", None, "float8 is requested, no matmul ran in that format"),
        ("compute_dtype", "bfloat16", "float32", "compute_dtype bfloat16 is requested, float32 is observed"),
    ],
)
def test_a_feature_is_told_in_words_of_its_own(key: str, requested: object, ran: object, told: str) -> None:
    assert _in_words(tiny_case("fsdp_2", accumulation=4), key, requested, ran) == told


def running(ran: Case, requested: Case) -> Trial:
    """Two stages that did what a schedule prescribes, judged as requested; only their actions are looked at."""
    trial = trial_of(tiny_case("fsdp_2"))
    for rank, step, _ in list(trial.steps()):
        trial = with_step(trial, rank, step.step, actions=tuple(map(str, actions_of_rank(ran, rank))))
    return another_case(trial, requested)


@pytest.mark.parametrize(
    ("ran", "requested", "told", "choices"),
    [
        (("GPipe", 1), ("GPipe", 4), "1 microbatch went through the pipeline, 4 are requested", 1),
        (("GPipe", 8), ("GPipe", 1), "8 microbatches went through the pipeline, 1 is requested", 1),
        (("GPipe", 4), ("1F1B", 4), "schedule GPipe ran, 1F1B is requested", 1),
        (
            ("GPipe", 2),
            ("1F1B", 4),
            "schedule GPipe ran, 1F1B is requested; 2 microbatches went through the pipeline, 4 are requested",
            2,
        ),
    ],
)
def test_another_schedule_and_another_number_of_microbatches_are_a_choice_each(
    ran: tuple[str, int], requested: tuple[str, int], told: str, choices: int
) -> None:
    def case(of: tuple[str, int]) -> Case:
        return tiny_case(ParallelDims(pp=2), schedule=of[0], microbatches=of[1])

    trial = running(case(ran), case(requested))
    found = [one for one in other_features(trial, broken("schedule")) if one.fitted == choices]
    assert [cause_line(one.cause) for one in found] == [told]
    assert not list(other_features(trial, broken("traffic")))


def test_units_that_are_finer_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert first_line(with_units(trial, *((fqn,) for fqn in trial.plan.shapes))).startswith(
        "fsdp2 units are finer than requested: parameters are gathered in 12 pieces, requested 3"
    )


def test_what_no_policy_and_no_claim_explains_is_told_as_seen() -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=policy) for policy in ("always", "never")))
    alone = trial_of(tiny_case("fsdp_2", reshard_after_forward="always"))
    mixed = with_rank(alone, 1, steps=trial.ranks[1].steps)
    assert first_line(mixed) == (
        "after forward: tok_embeddings, layers.0, norm and 1 more still gathered, should be freed on rank 1;"
        " reshard_after_forward always is requested"
    )


# ---- what is kept


@pytest.mark.parametrize(
    ("shapes", "told"),
    [
        (((8, 4), (4, 4)), "2 tensors with the shapes of whole parameters"),
        (((4, 4), (2, 4)), "2 tensors with the shapes of that rank's slices"),
        (((8, 4), (300,)), "2 tensors, 1 with the shapes of whole parameters"),
        (((300,),), "no parameter's shape"),
    ],
)
def test_copies_are_told_by_whose_shapes_they_have(shapes: tuple[tuple[int, ...], ...], told: str) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    held = tuple(HeldTensor(shape, "float32", 600) for shape in shapes)
    line = first_line(with_rank(trial, 1, held=held))
    size = "600 B" if len(shapes) == 1 else "1.2 kB"
    kept = f"{size} of float32 are retained in unaccounted tensors on rank 1"
    assert line.startswith(kept) and f"{told}" in line
