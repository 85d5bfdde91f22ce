"""Another value of a field of the request, or of two: what is proposed and proven. Literal evidence, no ranks."""

from __future__ import annotations

import dataclasses
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import broken, dims
from literal import (
    ADAMW,
    EIGHT,
    TINY,
    of_layout_alone,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step,
)
from literal_ranks import APART
from noisy import noise_of

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.traits import TrainerTraits
from harness.core.causes import diagnose
from harness.core.causes.hypothesis import Hypothesis
from harness.core.causes.request import Neighbour, neighbours, neighbours_of_one_field
from harness.core.checks import judge
from harness.core.judge.result import Cause, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.stages import actions_of_rank

CP_2 = ParallelDims(cp=2)
NINE = replace(ADAMW, global_batch=9)


def cause_of(trial: Trial) -> Cause:
    """The only cause, which explains all checks that fail."""
    results = judge(trial)
    found = diagnose(trial, results)
    assert found is not None and len(found.causes) == 1, found
    failed = {result.check for result in results if result.verdict is Verdict.FAIL}
    assert set(found.causes[0].explains) == failed
    assert dict(found.evidence)["explains"].startswith(f"{len(failed)} of {len(failed)} failing checks: ")
    return found.causes[0]


def proposed(trial: Trial, *checks: str) -> list[Hypothesis]:
    failed = {result.check: result for result in judge(trial) if result.verdict is Verdict.FAIL}
    return list(neighbours(trial, {name: failed[name] for name in checks if name in failed}))


FEATURE, POLICY = "another feature", "another policy after forward"


@pytest.mark.slow("many of a kind; the first run in the same way", after=6)
@pytest.mark.parametrize(
    ("layout", "requested", "ran", "kind"),
    [
        ("tp_2", {"sequence_parallel": True}, False, FEATURE),
        ("tp_2", {"sequence_parallel": False}, True, FEATURE),
        ("fsdp_2_tp_2", {"loss_parallel": True}, False, FEATURE),
        ("fsdp_2_tp_2", {"loss_parallel": False}, True, FEATURE),
        (CP_2, {"cp_rotation": "allgather", "training": EIGHT}, "alltoall", FEATURE),
        (CP_2, {"cp_load_balance": True, "training": EIGHT}, False, FEATURE),
        ("hsdp_2x2", {"defer_sync": True, "accumulation": 2}, False, FEATURE),
        ("hsdp_2x2", {"defer_sync": True, "accumulation": 2}, "all_reduce", FEATURE),
        ("hsdp_2x2", {"defer_sync": False, "accumulation": 2}, True, FEATURE),
        ("ddp_2", {"activation_checkpointing": "none"}, "full", FEATURE),
        ("ddp_2", {"activation_checkpointing": "full"}, "none", FEATURE),
        ("ddp_2", {"activation_checkpointing": "full"}, "op", FEATURE),
        ("ddp_2", {"wrapper": "ddp"}, "replicate", FEATURE),
        ("fsdp_2", {"wrapper": "fsdp2"}, "fsdp1", FEATURE),
        (
            dims(shard=3),
            {"wrapper": "zero2", "training": replace(NINE, global_batch=12), "accumulation": 2},
            "zero1",
            FEATURE,
        ),
        ("fsdp_2", {"reshard_after_forward": "always"}, "never", POLICY),
        ("fsdp_2", {"reshard_after_forward": "never"}, "default", POLICY),
        (dims(shard=4), {"reshard_after_forward": 2}, "always", POLICY),
        (dims(shard=4), {"reshard_after_forward": "always"}, 2, POLICY),
    ],
)
def test_a_feature_in_force_is_named_beside_the_one_requested(
    layout: Any, requested: dict[str, Any], ran: Any, kind: str
) -> None:
    name = next(iter(requested))
    trial = trial_of(tiny_case(layout, **requested), tiny_case(layout, **{**requested, name: ran}))
    cause = cause_of(trial)
    assert (cause.kind, cause.details, cause.expected) == (kind, ((name, ran),), str(requested[name]))


@pytest.mark.parametrize(
    ("requested", "ran", "details"),
    [
        ({"reduce_dtype": "bfloat16"}, {}, (("reduce_dtype", "float64"),)),
        ({"training": replace(ADAMW, compute_dtype="bfloat16")}, {}, (("compute_dtype", "float64"),)),
    ],
)
def test_dtypes_are_those_in_force_where_none_is_requested(
    requested: dict[str, Any], ran: dict[str, Any], details: tuple[Any, ...]
) -> None:
    trial = trial_of(tiny_case("fsdp_2", **requested), tiny_case("fsdp_2", **ran))
    (one,) = proposed(trial, "features")
    assert (one.cause.kind, one.cause.details, one.fitted_count) == (FEATURE, details, 1)


def test_a_recipe_is_assumed_of_whatever_case_is_assumed_already_with_the_noise_of_the_one_requested() -> None:
    requested, ran = (tiny_case("fsdp_2", replace(ADAMW, compute_dtype=dtype)) for dtype in ("bfloat16", None))
    trial = trial_of(requested, ran)
    noise = noise_of(trial.case)
    trial = replace(trial, reference=replace(trial.reference, noise={trial.case.noise_key: noise}))
    (one,) = proposed(trial, "features")
    assert one.assume is not None
    assumed = one.assume(replace(trial, case=replace(trial.case, name="another")))
    recipe = replace(trial.case.training, compute_dtype="float64")
    assert assumed.case == replace(trial.case, name="another", training=recipe)
    assert assumed.reference.noise == {trial.case.noise_key: noise, assumed.case.noise_key: noise}


@pytest.mark.slow("many hypotheses; tests/hypotheses/test_zero_as_ran.py names what ran instead")
def test_zero_that_cuts_nothing_is_another_stage_with_the_traffic_of_ddp_and_vectors_of_its_own() -> None:
    for layout, ran in ((dims(shard=3), dims(replicate=3)), ("fsdp_2_tp_2", dims(replicate=2, tp=2))):
        recipe = NINE if layout == dims(shard=3) else ADAMW
        for stage in ("zero1", "zero2") if recipe is NINE else ("zero1",):
            trial = trial_of(tiny_case(layout, recipe, wrapper=stage), tiny_case(ran, recipe))
            cause = cause_of(trial)
            assert (cause.kind, cause.expected) == ("another stage of ZeRO", stage)
    assert not any(one.cause.kind == cause.kind for one in neighbours(trial, broken("traffic")))


# ---- traits


@pytest.mark.parametrize(("trait", "value"), [("cp_heads", "key_value"), ("cp_sends", True)])
def test_a_trait_that_the_trainer_does_not_have_is_named(trait: str, value: Any) -> None:
    case = tiny_case(CP_2, EIGHT, model=replace(TINY, n_heads=2, n_kv_heads=1))
    trial = trial_of(case, traits=replace(APART, **{trait: value}))
    cause = cause_of(trial)
    assert (cause.kind, cause.details) == ("another trait", ((trait, getattr(APART, trait)),))


def test_every_switch_and_choice_of_a_request_is_tried_without_being_listed() -> None:
    everywhere = ParallelDims(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2)
    model = replace(TINY, dim=16, n_heads=4, n_kv_heads=4, n_layers=4)
    case = tiny_case(everywhere, replace(ADAMW, global_batch=64, seq_len=64), model=model, accumulation=2)
    trial = trial_of(tiny_case("single"))
    trial = replace(trial, case=case, plan=replace(trial.plan, dims=everywhere))
    tried = {name for one in neighbours_of_one_field(trial) for _, name in one.values}
    for owner in (Features, TrainerTraits):
        switches = {one.name for one in dataclasses.fields(owner) if one.type == "bool"}
        assert switches - tried <= {"async_save"}, owner  # which is of launches that save
    assert {"schedule", "microbatches", "quantize", "compute_dtype", "attention", "loss_chunks"} <= tried
    assert not {"optimizer", "decay", "steps", "seed"} & tried


def test_what_there_is_no_case_of_is_not_tried() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    tried = {(name, value) for one in neighbours_of_one_field(trial) for (_, name), value in one.values.items()}
    assert not {"schedule", "cp_rotation", "loss_parallel"} & {name for name, _ in tried}
    assert (
        ("loss_chunks", 0) not in tried
        and ("wrapper", "ddp") not in tried
        and ("reshard_after_forward", 2) not in tried
    )


@pytest.mark.parametrize(
    ("layout", "changes", "policies"),
    [
        (dims(shard=8), {}, ["always", "never", 2, 4]),
        (dims(shard=8), {"reshard_after_forward": 2}, ["always", "never", "default", 4]),
        (dims(shard=4), {"fsdp_units": "observed"}, ["always", "never", 2]),
    ],
)
def test_policies_are_words_and_what_divides_the_shards_and_no_default_of_units_that_are_observed(
    layout: ParallelDims, changes: dict[str, Any], policies: list[Any]
) -> None:
    trial = trial_of(tiny_case(layout, **changes), tiny_case(layout))
    found = [
        one.values["features", "reshard_after_forward"] for one in neighbours_of_one_field(trial) if is_policy(one)
    ]
    assert found == policies


def is_policy(one: Neighbour) -> bool:
    return ("features", "reshard_after_forward") in one.values


# ---- two fields


def pipelined(name: str, number: int, **more: Any) -> Case:
    return tiny_case(ParallelDims(pp=2), model=replace(TINY, n_layers=4), schedule=name, microbatches=number, **more)


def acting(requested: Case, ran: Case) -> Trial:
    """What ranks did, of a trial that is a pipeline's by its case alone."""
    trial = replace(trial_of(tiny_case("fsdp_2")), case=requested)
    for rank, step in list(trial.own_steps()):
        actions = tuple(map(str, actions_of_rank(ran, rank))) * ran.features.accumulation
        trial = with_step(trial, rank, step.step, actions=actions)
    return trial


@pytest.mark.parametrize(
    ("requested", "ran", "details"),
    [
        (pipelined("GPipe", 2), pipelined("GPipe", 4), {"microbatches": 4}),
        (pipelined("GPipe", 4), pipelined("1F1B", 4), {"schedule": "1F1B"}),
        (pipelined("1F1B", 4), pipelined("GPipe", 2), {"schedule": "GPipe", "microbatches": 2}),
        (
            pipelined("LoopedBFS", 4),
            pipelined("Interleaved1F1B", 2),
            {"schedule": "Interleaved1F1B", "microbatches": 2},
        ),
    ],
)
def test_a_schedule_and_a_number_of_microbatches_are_one_field_or_two(
    requested: Case, ran: Case, details: dict[str, Any]
) -> None:
    found = [one for one in proposed(acting(requested, ran), "schedule") if dict(one.cause.details) == details]
    assert [(one.cause.kind, one.fitted_count) for one in found] == [(FEATURE, len(details))]


# ---- units


def claiming(trial: Trial, *units: tuple[str, ...]) -> Trial:
    """Every rank claims these, each with what is kept of its first parameter by the plan."""

    def of_rank(trial: Trial, rank: int) -> Trial:
        wrappers = {fqn: wrapper for wrapper in trial.ranks[rank].structure.values() for fqn in wrapper.parameters}
        units_of = {unit[0]: replace(wrappers[unit[0]], parameters=unit) for unit in units}
        return with_rank(trial, rank, structure=units_of)

    return with_every_rank(trial, of_rank)


def test_units_as_they_are_claimed_are_named_with_what_the_check_found() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    cause = cause_of(claiming(trial, *((fqn,) for fqn in trial.plan.shapes)))
    assert (cause.kind, cause.details) == ("other units", (("fsdp_units", "observed"),))
    assert cause.finding is not None and (cause.finding.check, cause.finding.kind) == ("placements", "unit")


def test_what_units_keep_is_assumed_as_they_claim_it_whatever_policy_is_requested() -> None:
    never, always = (tiny_case("fsdp_2", reshard_after_forward=way) for way in ("never", "always"))
    trial = trial_of(never, always)
    found = {one.cause.kind: one for one in proposed(trial, "reshard")}
    assert [*found] == [POLICY, "other units"]
    assume = found["other units"].assume
    assert assume is not None and assume(trial).plan.after_forward == trial_of(always).plan.after_forward


def test_of_units_of_fsdp1_that_are_wrong_no_policy_is_tried() -> None:
    ways = (tiny_case("fsdp_2", wrapper="fsdp1", reshard_after_forward=way) for way in ("default", "never"))
    trial = trial_of(*ways)
    assert [one.cause.kind for one in proposed(trial, "reshard")] == [POLICY]
    assert proposed(claiming(trial, tuple(trial.plan.shapes)), "reshard", "placements") == []


# ---- what is no neighbour


def test_of_a_recording_no_feature_is_tried() -> None:
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=way) for way in ("always", "never")))
    assert list(neighbours(of_layout_alone(trial), broken("reshard", "traffic"))) == []


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=1)
@pytest.mark.parametrize("seed", range(3))
def test_random_traffic_and_numbers_have_no_neighbour(seed: int) -> None:
    draw = np.random.default_rng(seed)
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    noisy = with_every_rank(
        trial,
        lambda t, rank: with_collectives(t, rank, lambda call: [replace(call, bytes=int(draw.integers(1, 10**6)))]),
    )
    assert {one.check for one in judge(noisy) if one.verdict is Verdict.FAIL} >= {"traffic"}
    assert proposed(noisy, "traffic", "memory", "reshard") == []
    wrong = {fqn: draw.normal(size=g.shape) for fqn, g in trial.ranks[0].steps[0].gradients.items()}
    assert proposed(with_step(trial, 0, 1, gradients=wrong), "gradients", "grad_norm", "update") == []


def test_a_check_that_fails_on_another_rank_as_well_is_no_proof() -> None:
    """What is proposed fits the rank that the check found first; all ranks are judged under it."""
    trial = trial_of(*(tiny_case("fsdp_2", reshard_after_forward=way) for way in ("always", "never")))
    right = trial_of(tiny_case("fsdp_2", reshard_after_forward="always"))
    found = diagnose(mixed := with_rank(right, 1, steps=trial.ranks[1].steps), judge(mixed))
    assert found is not None and found.kinds == (POLICY,)
    assert found.causes[0].details == () and found.causes[0].ranks == (1,)
