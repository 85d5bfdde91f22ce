"""Which other value of a feature or the recipe is proposed for what traces and traffic show. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import DDP_2, broken, first_line
from literal import ADAMW, EIGHT, judged, tiny_case, trial_of, with_rank, with_step
from noisy import noise_of

from harness.diagnosis.features import CHOICES, _other_schedules, _other_values, odd_traces, other_features
from harness.diagnosis.hypothesis import Hypothesis, verdict_of
from harness.evidence.records import Wrapper
from harness.evidence.step import Matmul
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.plan.stages import actions_of_rank
from harness.report.cause_text import cause_line
from harness.spec.case import Case
from harness.spec.dims import ParallelDims

CP_2 = ParallelDims(cp=2)
IN_BFLOAT16 = {"training": replace(ADAMW, compute_dtype="bfloat16")}


def proposed(trial: Trial, *checks: str) -> list[Hypothesis]:
    return list(other_features(trial, {check: judged(check, trial) for check in checks}))


def moved(what: str, where: str, expected: str, observed: str) -> tuple[str, str]:
    return "traffic", f"{what}: {where}: expected {expected} per step, observed {observed}"


ONCE_A_STEP = "requested once a step"
SCATTERED = moved("gradients", "reduce_scatter over dp_shard in backward", "1.888 kB", "3.776 kB")


@pytest.mark.parametrize(
    ("layout", "requested", "ran", "told", "lines"),
    [
        (
            "tp_2",
            {"sequence_parallel": False},
            {},
            "sequence_parallel False is requested, True is observed",
            [
                moved("activations", "all_reduce over tp in forward", "3.072 kB", "0 B"),
                moved("activations", "all_reduce over tp in backward", "3.072 kB", "96 B"),
            ],
        ),
        (
            "fsdp_2_tp_2",
            {},
            {"loss_parallel": False},
            "loss_parallel True is requested, False is observed",
            [moved("activations", "all_gather over tp in forward", "1.536 kB", "2.56 kB")],
        ),
        (
            CP_2,
            {},
            {"cp_rotation": "alltoall"},
            "cp_rotation allgather is requested, alltoall is observed",
            [
                moved("parameters and keys and values", "all_gather over cp in forward", "3.936 kB", "1.888 kB"),
                moved("parameters and keys and values", "all_gather over cp in backward", "3.648 kB", "1.6 kB"),
                moved("gradients of keys and values", "all_to_all over cp in backward", "2.048 kB", "3.072 kB"),
            ],
        ),
        (
            "hsdp_2x2",
            {"accumulation": 2},
            {"accumulation": 2, "defer_sync": False},
            f"gradients are reduced after every microbatch (2 times a step), {ONCE_A_STEP}",
            [SCATTERED, moved("gradients", "all_reduce over dp_replicate in backward", "944 B", "1.888 kB")],
        ),
        (
            "hsdp_2x2",
            {"accumulation": 2},
            {"accumulation": 2, "defer_sync": "all_reduce"},
            f"gradients are reduced over dp_shard after every microbatch (2 times a step), {ONCE_A_STEP}",
            [SCATTERED],
        ),
    ],
)
def test_what_is_moved_tells_the_value_in_force(
    layout: Any, requested: dict[str, Any], ran: dict[str, Any], told: str, lines: list[tuple[str, str]]
) -> None:
    """With the first rank's flows that are not as planned."""
    trial = trial_of(tiny_case(layout, **requested), tiny_case(layout, **ran))
    (one,) = proposed(trial, "traffic")
    assert (one.cause.kind, cause_line(one.cause), one.fitted) == ("another feature", told, 1)
    assert one.lines[: len(lines)] == tuple(lines)
    assert one.assume(trial).case == tiny_case(layout, **ran)
    assert verdict_of(one.assume(trial), "traffic") is Verdict.PASS
    assert not list(other_features(trial, broken("reshard", "schedule")))


@pytest.mark.parametrize(
    ("layout", "requested", "ran", "check", "told"),
    [
        (
            CP_2,
            {"training": EIGHT},
            {"training": EIGHT, "cp_load_balance": False},
            "samples",
            "cp_load_balance True is requested, False is observed",
        ),
        (
            "ddp_2",
            {},
            {"activation_checkpointing": "full"},
            "features",
            "activation checkpointing none is requested, full is observed",
        ),
        (
            "ddp_2",
            {"activation_checkpointing": "full"},
            {"activation_checkpointing": "op"},
            "features",
            "activation checkpointing full is requested, op is observed",
        ),
        (
            "fsdp_2",
            {"reduce_dtype": "bfloat16"},
            {},
            "features",
            "gradients are reduced in float64, requested bfloat16",
        ),
        ("fsdp_2", IN_BFLOAT16, {}, "features", "compute_dtype bfloat16 is requested, float64 is observed"),
        ("fsdp_2", {}, {"wrapper": "fsdp1"}, "features", "wrapper fsdp2 is requested, fsdp1 is observed"),
        ("ddp_2", {}, {"wrapper": "replicate"}, "features", "wrapper ddp is requested, replicate is observed"),
    ],
)
def test_traces_and_samples_tell_the_value_in_force(
    layout: Any, requested: dict[str, Any], ran: dict[str, Any], check: str, told: str
) -> None:
    """Of traffic nothing is said where it is as planned."""
    trial = trial_of(tiny_case(layout, **requested), tiny_case(layout, **ran))
    (one,) = proposed(trial, check)
    assert (one.cause.kind, cause_line(one.cause), one.fitted, one.lines) == ("another feature", told, 1, ())
    assert verdict_of(one.assume(trial), check) is Verdict.PASS
    assert not list(other_features(trial, broken("gradients", "schedule")))


def test_what_is_requested_is_not_proposed_and_dtypes_are_those_in_force() -> None:
    def texts(case: Case) -> list[str]:
        return [one.text for one in _other_values(case, CHOICES)]

    case = tiny_case("fsdp_2", activation_checkpointing="full", defer_sync=False, **IN_BFLOAT16)
    told = [
        "sequence_parallel True is requested, False is observed",
        "loss_parallel True is requested, False is observed",
        "cp_rotation allgather is requested, alltoall is observed",
        "cp_load_balance True is requested, False is observed",
        "defer_sync False is requested, True is observed",
        "defer_sync False is requested, all_reduce is observed",
        "activation checkpointing full is requested, none took place",
        "activation checkpointing full is requested, layer is observed",
        "activation checkpointing full is requested, op is observed",
    ]
    reduced = ["gradients are reduced in float64, requested {}", "gradients are reduced in float32, requested {}"]
    computed = [f"compute_dtype bfloat16 is requested, {dtype} is observed" for dtype in ("float64", "float32")]
    assert texts(case) == [*told, *(one.format("bfloat16") for one in reduced), *computed]
    others = [reduced[0].format("float32"), "gradients are reduced in bfloat16, requested float32"]
    assert texts(replace(case, features=replace(case.features, reduce_dtype="float32"))) == [*told, *others, *computed]


def test_a_recipe_that_there_is_not_is_not_proposed() -> None:
    """TF32 is a way to multiply float32, so that no matmul of such a recipe is computed in another dtype."""
    case = tiny_case("fsdp_2", replace(ADAMW, dtype="float32", tf32=True))
    assert "compute_dtype float32 is requested, bfloat16 is observed" not in {
        one.text for one in _other_values(case, CHOICES)
    }


def test_matmuls_in_the_dtype_of_parameters_are_one_value_not_two() -> None:
    """Whether that is requested as such, or as none of its own."""
    low = replace(ADAMW, dtype="float32", compute_dtype="bfloat16")
    trial = trial_of(
        tiny_case("fsdp_2", low, reduce_dtype="float64"), tiny_case("fsdp_2", replace(low, compute_dtype=None))
    )
    told = [cause_line(one.cause) for one in proposed(trial, "features")]
    assert told == ["compute_dtype bfloat16 is requested, float32 is observed"]


def test_a_recipe_is_assumed_of_whatever_case_is_assumed_already() -> None:
    """With the noise of the one requested."""
    trial = trial_of(tiny_case("fsdp_2", **IN_BFLOAT16), tiny_case("fsdp_2"))
    noise = noise_of(trial.case)
    trial = replace(trial, reference=replace(trial.reference, noise={trial.case.noise_key: noise}))
    (one,) = proposed(trial, "features")
    assumed = one.assume(replace(trial, case=replace(trial.case, name="another", why="assumed")))
    recipe = replace(trial.case.training, compute_dtype="float64")
    assert assumed.case == replace(trial.case, name="another", why="assumed", training=recipe)
    assert assumed.reference.noise == {trial.case.noise_key: noise, assumed.case.noise_key: noise}


# ---- wrappers


def test_a_wrapper_with_flat_parameters_is_proven_whatever_the_order_of_the_trainers_rows() -> None:
    trial = trial_of(tiny_case("fsdp_2"), tiny_case("fsdp_2", wrapper="fsdp1"))
    rows = {"layers.0.attention.wq.weight": np.array([1, 2, 3, 0])}
    for one in (trial, replace(trial, reference=replace(trial.reference, rows=rows))):
        assert first_line(one) == "wrapper fsdp2 is requested, fsdp1 is observed"
        (found,) = proposed(one, "features")
        assert verdict_of(found.assume(one), "shard_contents") is Verdict.PASS


def test_what_is_flat_already_stays_as_it_is_under_another_assumption() -> None:
    case = tiny_case("fsdp_2", wrapper="fsdp1")
    trial = trial_of(replace(case, features=replace(case.features, activation_checkpointing="full")), case)
    assumed = [one.assume(trial) for one in proposed(trial, "features")]
    assert [one.case.features.activation_checkpointing for one in assumed] == ["none", "layer"]
    assert all(one.run is trial.run for one in assumed)


def wrapped(trial: Trial, **kinds: str) -> Trial:
    """By rank, of one kind or of two."""
    for rank, of in kinds.items():
        structure = {f"layers.{i}": Wrapper(kind) for i, kind in enumerate(of.split())}
        trial = with_rank(trial, int(rank.removeprefix("rank_")), structure=structure)
    return trial


@pytest.mark.parametrize(
    ("kinds", "told"),
    [
        ({"rank_0": "", "rank_1": ""}, "none is observed"),
        ({"rank_1": ""}, "none is observed on rank 1"),
        ({"rank_0": "replicate", "rank_1": "fsdp2"}, "replicate is observed on rank 0; fsdp2 is observed on rank 1"),
        ({"rank_0": "replicate ddp", "rank_1": "ddp replicate"}, "ddp and replicate is observed"),
        ({"rank_0": "replicate"}, "replicate is observed on rank 0"),
    ],
)
def test_another_wrapper_is_told_with_its_ranks(kinds: dict[str, str], told: str) -> None:
    trial = wrapped(DDP_2, **kinds)
    (fact,) = odd_traces(trial, {"features": judged("features", trial)})
    assert cause_line(fact.cause) == f"wrapper ddp is requested, {told}"
    assert fact.checks == ("features", "placements", "shard_contents", "reshard", "traffic")
    assert not proposed(trial, "features")


def test_a_wrapper_around_one_data_rank_is_not_blamed_for_other_traces() -> None:
    """The check ignores it: it looks after nobody else."""
    trial = wrapped(trial_of(tiny_case("single")), rank_0="ddp")
    assert judged("features", trial).verdict is Verdict.PASS
    step = trial.ranks[0].steps[0]
    computing = replace(step.activity, matmuls=step.activity.matmuls | {Matmul("other", "float64"): 3})
    odd = with_step(trial, 0, 1, activity=computing)
    (fact,) = odd_traces(odd, {"features": judged("features", odd)})
    assert cause_line(fact.cause) == (
        "matmuls run outside training passes: 3 matmuls outside forward and backward (rank 0, step 1)"
    )
    assert fact.checks == ("features",)


# ---- schedules


def pipelined(name: str, number: int, stages: int | None = None, **more: Any) -> Case:
    return tiny_case(ParallelDims(pp=2), schedule=name, microbatches=number, stages_per_rank=stages, **more)


def acting(requested: Case, ran: Case) -> Trial:
    """What a rank did, of a trial that is a pipeline's by its case alone."""
    trial = replace(trial_of(tiny_case("fsdp_2")), case=requested)
    for rank, step in list(trial.own_steps()):
        actions = tuple(map(str, actions_of_rank(ran, rank))) * ran.features.accumulation
        trial = with_step(trial, rank, step.step, actions=actions)
    return trial


@pytest.mark.parametrize(
    ("requested", "ran", "told", "fitted"),
    [
        (
            pipelined("GPipe", 2),
            pipelined("GPipe", 3),
            ["3 microbatches went through the pipeline, 2 are requested"],
            1,
        ),
        (pipelined("GPipe", 1), pipelined("GPipe", 8), ["8 microbatches went through the pipeline, 1 is requested"], 1),
        (pipelined("GPipe", 4), pipelined("1F1B", 4), ["schedule 1F1B ran, GPipe is requested"], 1),
        (pipelined("GPipe", 4), pipelined("LoopedBFS", 4, 1), ["schedule LoopedBFS ran, GPipe is requested"], 1),
        (
            pipelined("LoopedBFS", 4),
            pipelined("Interleaved1F1B", 2),
            [
                "schedule Interleaved1F1B ran, LoopedBFS is requested; 2 microbatches went through the pipeline, 4 are requested"
            ],
            2,
        ),
        (
            pipelined("1F1B", 4, accumulation=2),
            pipelined("GPipe", 4, accumulation=2),
            ["schedule GPipe ran, 1F1B is requested"],
            1,
        ),
        (pipelined("1F1B", 4), pipelined("GPipe", 9), [], 0),
        (pipelined("1F1B", 4, accumulation=2), pipelined("GPipe", 4), [], 0),
    ],
)
def test_what_ran_tells_the_schedule_and_the_number_of_microbatches(
    requested: Case, ran: Case, told: list[str], fitted: int
) -> None:
    found = list(_other_schedules(acting(requested, ran)))
    assert [(one.check, one.text, one.fitted) for one in found] == [("schedule", text, fitted) for text in told]
    chosen = [(one.case.features.schedule, one.case.microbatches, one.case.stages_per_rank) for one in found]
    assert chosen == [(ran.features.schedule, ran.microbatches, requested.stages_per_rank)] * len(told)


def test_a_schedule_is_proposed_that_all_ranks_followed_in_all_steps_of_a_pipeline() -> None:
    requested, ran = pipelined("GPipe", 4), pipelined("1F1B", 4)
    trial = acting(requested, ran)
    for rank, step in ((1, 1), (0, 3)):
        assert not list(_other_schedules(with_step(trial, rank, step, actions=("0F0",))))
    assert not list(_other_schedules(trial_of(tiny_case("fsdp_2"))))
