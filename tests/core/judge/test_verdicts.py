"""The margins of the checks on literal evidence: how much each examines, what equality to the last bit is worth, and what
lies just beyond what a check looks at."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checked import like, where
from literal import (
    ADAMW,
    EIGHT,
    UNEVEN,
    judged,
    tiny_case,
    trial_of,
    with_every_rank,
    with_parameter,
    with_rank,
    with_step,
    with_value,
)

from harness.core.case.dims import ParallelDims
from harness.core.checks import judge, run_check
from harness.core.evidence.records import Collective
from harness.core.judge.finding import Bound, Limit, Part
from harness.core.judge.received_samples import possible_positions, samples_of_shares, samples_of_step
from harness.core.judge.result import Verdict
from harness.core.judge.tolerance import Bounds
from harness.core.judge.trial import Trial

WQ = "layers.0.attention.wq.weight"
OF_NUMBERS = ("loss", "reported_loss", "grad_norm", "gradients")
EXAMINED: dict[str, Any] = {
    "hsdp_2x2": (
        tiny_case("hsdp_2x2", runs=2),
        {
            **{"completed": 4, "finite": 16, "collective_order": 108, "features": 160, "memory": 36, "placements": 72},
            **{"process_groups": 8, "reshard": 144, "settings": 84, "shard_contents": 48, "traffic": 60},
            **{
                "initial_weights": 12,
                "samples": 24,
                "determinism": 12,
                "golden": 6,
                "grad_norm": 12,
                "gradients": 144,
                "loss": 3,
            },
            **{"replica_agreement": 144, "reported_loss": 12, "reported_rate": 12, "update": 144},
        },
    ),
    "fsdp_2_tp_2": (
        tiny_case("fsdp_2_tp_2"),
        {
            **{
                "completed": 4,
                "exchange": 4,
                "finite": 16,
                "collective_order": 204,
                "features": 160,
                "memory": 36,
                "placements": 72,
            },
            **{"process_groups": 8, "reshard": 144, "settings": 84, "shard_contents": 48, "traffic": 108},
            **{"initial_weights": 12, "samples": 48, "golden": 6, "grad_norm": 12, "gradients": 144, "loss": 3},
            **{"replica_agreement": 36, "reported_loss": 12, "reported_rate": 12, "update": 144},
        },
    ),
    "fsdp_2_cp_2": (
        tiny_case(ParallelDims(dp_shard=2, cp=2), EIGHT),
        {
            **{
                "completed": 4,
                "exchange": 4,
                "finite": 16,
                "collective_order": 156,
                "features": 112,
                "memory": 36,
                "placements": 72,
            },
            **{"process_groups": 8, "reshard": 144, "settings": 84, "shard_contents": 48, "traffic": 84},
            **{
                "initial_weights": 12,
                "positions": 12,
                "samples": 48,
                "golden": 6,
                "grad_norm": 12,
                "gradients": 144,
                "loss": 3,
            },
            **{"reported_loss": 12, "reported_rate": 12, "update": 144},
        },
    ),
}


@pytest.mark.parametrize("layout", EXAMINED)
def test_every_check_examines_all_that_there_is(layout: str) -> None:
    case, expected = EXAMINED[layout]
    results = judge(trial_of(case))
    assert {result.check: result.examined for result in results if result.examined} == expected
    assert {result.check for result in results if result.verdict is Verdict.PASS} == set(expected)


def test_a_check_without_an_object_says_why() -> None:
    notes = {result.check: result.note for result in judge(trial_of(tiny_case("single"))) if not result.examined}
    assert notes == {
        "collective_order": "one rank has no peers",
        "process_groups": "one rank has no groups",
        "reshard": "nothing is gathered: no data parallelism",
        "schedule": "no pipeline: pp 1",
        "traffic": "one rank moves nothing",
        "positions": "the model receives none: it counts from 0, or reads them from a table",
        "resume": "nothing is resumed",
        "checkpoint": "this launch writes none",
        "determinism": "the case requests one run (runs: 2 repeats it)",
        "replica_agreement": "no two ranks hold the same slice of anything",
        "exchange": "neither tensor, context nor pipeline parallelism",
        "export": "no export is requested",
        "reported_numbers": "this trainer reports no others",
    }


def test_a_trainer_that_displays_no_norm_claims_none() -> None:
    trial = with_every_rank(trial_of(tiny_case("fsdp_2")), lambda t, rank: with_rank(t, rank, reports=("loss",)))
    told = judged("grad_norm", trial)
    note = "this trainer reports none; clipping by it is judged by the check update"
    assert (told.verdict, told.note) == (Verdict.NOT_APPLICABLE, note)
    assert judged("grad_norm", with_rank(trial, 1, reports=("grad_norm",))).verdict is Verdict.PASS


# ---- numbers


@pytest.mark.parametrize("check", OF_NUMBERS)
def test_what_is_equal_to_the_bit_passes_with_no_room_at_all(check: str) -> None:
    trial = replace(trial_of(tiny_case("single")))  # a trial of its own, whose bounds may be set
    no_room = dict.fromkeys((1, 2, 3), 0.0)
    trial.__dict__["bounds"] = Bounds(no_room, no_room, no_room)
    told = judged(check, trial)
    assert (told.verdict, told.largest) == (Verdict.PASS, 0)


@pytest.mark.parametrize(
    ("check", "spoil", "off"),
    [
        ("reported_loss", lambda t: with_step(t, 1, 2, reported_loss=1.5 * t.reference.steps[1].loss), 0.5),
        ("gradients", lambda t: with_value(t, 1, 2, "gradients", WQ, lambda g: g * float("nan")), math.inf),
    ],
)
def test_a_number_that_is_off_is_told_with_the_bound(check: str, spoil: Any, off: float) -> None:
    trial = spoil(trial_of(tiny_case("fsdp_2")))
    told = judged(check, trial)
    bound = trial.bounds.loss[2] if check == "reported_loss" else trial.bounds.gradient[2]
    assert told.findings[0].bound == Bound(bound)
    assert told.largest == pytest.approx(off)


def test_values_that_are_nowhere_in_the_seed_are_not_compared_with_any_slice() -> None:
    """Where the plan gives a slice as well, that one is; a parameter of no plan is infinitely far."""
    trial = trial_of(tiny_case("fsdp_2"))
    strange = with_parameter(trial, 1, WQ, value=trial.ranks[1].parameters[1].value + 1)
    assert judged("gradients", strange).verdict is Verdict.PASS
    slices = {rank: {f: part for f, part in held.items() if f != WQ} for rank, held in strange.plan.slices.items()}
    told = judged("gradients", replace(strange, plan=replace(strange.plan, slices=slices)))
    assert told.findings[0] == like(
        1,
        "the reference's",
        math.inf,
        step=1,
        name=WQ,
        bound=Bound(trial.bounds.gradient[1]),
        unit="of the largest entry",
        quantity="gradient",
    )


# ---- repeats, memory, groups, traffic


def test_a_repeat_in_more_microbatches_differs() -> None:
    trial = trial_of(tiny_case("single", runs=2))
    parts = trial.ranks[0].steps[1].microbatches
    more = with_step(trial, 0, 2, microbatches=(*parts, *parts)).run
    told = judged("determinism", replace(trial, repeat=more))
    assert told.verdict is Verdict.FAIL
    assert [(one.step, one.note) for one in told.findings] == [(2, "samples of microbatches, whose number differs")]


def test_gradients_that_are_kept_whole_are_named() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    held = trial.ranks[1].steps[2].memory
    told = judged("memory", with_step(trial, 1, 3, memory=held | {"gradients": 2 * held["parameters"]}))
    assert told.findings == (like(1, Limit(least=0, most=944), 1888, step=3, unit="bytes", quantity="gradients"),)


def test_a_send_to_nobody_knows_whom_is_not_paired() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    send = Collective("send", (0, 1), "p2p", "float64", 64, "forward", 1, 9)
    told = judged("collective_order", with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, send)))
    assert told.verdict is Verdict.PASS


def test_what_is_reduced_elsewhere_than_over_the_data_ranks_has_any_dtype() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    for call in (
        Collective("all_reduce", (0, 1), "tp", "float32", 8, "backward", 1, 9),  # of another axis
        Collective("all_reduce", (0, 2), "dp", "float32", 8, "forward", 1, 9),  # of activations
        Collective("all_gather", (0, 2), "dp", "bfloat16", 8, "backward", 1, 9),  # of parameters
        Collective("all_reduce", (0, 2), "dp", "int64", 8, "backward", 1, 9),  # DDP's talk about buckets
    ):
        more = with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, call))
        assert judged("features", more).verdict is Verdict.PASS, call
    wrong = Collective("all_reduce", (0, 2), "dp", "float32", 8, "backward", 1, 9)
    told = judged("features", with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, wrong)))
    assert told.findings == (like(0, "float64", "float32 and float64", quantity="dtype of reduced gradients"),)


def test_memory_after_forward_is_told_as_a_range_where_padding_is_allowed() -> None:
    trial = trial_of(tiny_case("fsdp_2", model=UNEVEN))
    (record,) = trial.ranks[1].steps[0].after_forward
    padding = trial.plan.padding_after_forward[1]
    assert padding > 0
    for storage in (record.storage, record.storage + padding):
        fits = with_step(trial, 1, 1, after_forward=(replace(record, storage=storage),))
        assert judged("reshard", fits).verdict is Verdict.PASS, storage
    for storage in (record.storage - 1, record.storage + padding + 1):
        told = judged("reshard", with_step(trial, 1, 1, after_forward=(replace(record, storage=storage),)))
        (finding,) = told.findings
        allowed = Limit(record.storage, record.storage + padding)
        name = "memory of all parameters after forward"
        assert finding == like(1, allowed, storage, step=1, quantity=name, unit="bytes")


# ---- samples


def test_each_share_of_the_batch_is_told_by_its_first_rank() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    received = samples_of_step(trial, 1).by_rank
    assert sorted(received) == [0, 1, 2, 3]
    assert samples_of_shares(trial, 1).by_rank == {0: received[0], 2: received[2]}


def test_a_cp_ranks_tokens_are_looked_for_where_anybody_would_cut_them() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), EIGHT))
    assert [at.tolist() for at in possible_positions(trial, 0, 1)] == [
        [0, 1, 6, 7],
        [0, 1, 2, 3],
        [2, 3, 4, 5],
        [4, 5, 6, 7],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 1, 6, 7],  # those that it was given
    ]


def test_rows_of_no_sample_are_counted_by_rank() -> None:
    def garbled(trial: Trial, rank: int) -> Trial:
        parts = tuple(replace(part, tokens=part.tokens * 0 + 6) for part in trial.ranks[rank].steps[1].microbatches)
        return with_step(trial, rank, 2, microbatches=parts)

    told = judged("samples", garbled(trial_of(tiny_case("fsdp_2", ADAMW)), 1))
    expected = like(1, 0, 4, step=2, quantity="rows of tokens that are no sample of the recipe's steps")
    assert expected in told.findings


# ---- what the mutants of the checks requested


def test_a_gradient_is_off_by_a_share_of_the_whole_parameters_largest_entry_on_every_rank() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    whole = np.abs(trial.reference.steps[0].gradients[WQ]).max()
    for rank in (0, 1):
        largest = np.abs(trial.ranks[rank].steps[0].gradients[WQ]).max()
        told = judged("gradients", with_value(trial, rank, 1, "gradients", WQ, lambda g: 1.5 * g))
        assert told.findings[0].observed == pytest.approx(0.5 * largest / whole), rank
    assert len({np.abs(trial.ranks[rank].steps[0].gradients[WQ]).max() for rank in (0, 1)}) == 2


@pytest.mark.parametrize("phase", ["optimizer", "other"])
def test_much_that_is_moved_outside_of_forward_and_backward_is_named(phase: str) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    most, done = trial.plan.outside_bytes[0], 8  # the loss, which is summed over the ranks
    for ranks, extra, findings in (((0, 1), 0, ()), ((0, 1), 1, (most + 1,)), ((1,), 10**6, ())):
        call = Collective("all_gather", ranks, "g", "float64", most - done + extra, phase, 2, 99)
        told = judged("traffic", with_rank(trial, 1, collectives=(*trial.ranks[1].collectives, call)))
        assert told.findings == tuple(
            like(
                1,
                Limit(most=most),
                moved,
                step=2,
                kind="collective",
                phase="outside",
                quantity="bytes moved",
                unit="bytes",
            )
            for moved in findings
        )


def calling(trial: Trial, op: str, dtype: str, count: int, step: int) -> Trial:
    call = Collective(op, (0, 1), "g", dtype, count, "forward", step, 99)
    return with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, call))


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool"])
def test_integers_that_are_gathered_inside_of_forward_are_named(dtype: str) -> None:
    trial = calling(trial_of(tiny_case("fsdp_2")), "all_gather", dtype, 64, 1)
    told = like(0, 0, 64, step=1, unit="bytes", quantity="integers in forward and backward")
    assert judged("traffic", trial).findings == (told,)


def test_ddp_may_agree_on_its_buckets_in_two_steps_and_with_find_unused_parameters_on_what_was_used_in_all() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    most = trial.plan.integer_bytes
    assert most == (4 * 12 + 2 * 2 + 8) * 8
    used = trial.plan.used_bytes
    assert used == 4 * 12 + 8
    told = (most, 2, "PASS"), (most + 1, 2, "FAIL"), (used, 3, "FAIL"), (1, 3, "FAIL")
    for count, step, verdict in told:
        assert judged("traffic", calling(trial, "broadcast", "int32", count, step)).verdict == verdict
    finding = {module: replace(it, find_unused_parameters=True) for module, it in trial.ranks[0].structure.items()}
    for count, verdict in ((used, "PASS"), (used + 1, "FAIL")):
        unused = with_rank(trial, 0, structure=finding)
        assert judged("traffic", calling(unused, "broadcast", "int32", count, 3)).verdict == verdict


@pytest.mark.parametrize("op", ["send", "recv"])
def test_a_stage_may_greet_its_neighbour_with_one_number_and_no_more(op: str) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    for count, passes in ((8, True), (9, False)):
        call = Collective(op, (0, 1), "p2p", "float64", count, "pipeline", 1, 99, peer=1)
        told = judged("traffic", with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, call)))
        assert (told.verdict is Verdict.PASS) is passes, count
    tiny = Collective("all_reduce", (0, 1), "g", "float64", 8, "forward", 1, 99)
    assert judged("traffic", with_rank(trial, 0, collectives=(*trial.ranks[0].collectives, tiny))).findings == (
        like(0, 0, 8, step=1, name="all_reduce", unit="bytes", phase="forward", axis="dp_replicate", group=(0, 1)),
    )


def test_slices_of_flattened_parameters_are_told_in_elements() -> None:
    trial = trial_of(tiny_case("fsdp_2", wrapper="fsdp1"))
    value = trial.ranks[0].parameters[0].value
    told = judged("shard_contents", with_parameter(trial, 0, "tok_embeddings.weight", value=value[:16]))
    assert told.findings == (
        like(
            0,
            Part(((0, 32),), (32,), flat=True),
            Part(((0, 16),), (32,), flat=True),
            name="tok_embeddings.weight",
            quantity="slice",
        ),
    )
    whole = trial.reference.weights["tok_embeddings.weight"]
    told = judged("shard_contents", with_parameter(trial, 1, "tok_embeddings.weight", value=whole))
    assert [finding.observed for finding in told.findings] == [Part(((0, 32),), (32,), flat=True)]
    cut = trial_of(tiny_case(ParallelDims(dp_shard=4), wrapper="fsdp1"))
    value = next(t.value for t in cut.ranks[2].parameters if t.fqn == "norm.weight")
    told = judged("shard_contents", with_parameter(cut, 1, "norm.weight", value=value))
    halves = (Part(((start, start + 2),), (4,), flat=True) for start in (0, 2))
    assert told.findings == (like(1, *halves, name="norm.weight", quantity="slice"),)


def test_the_bound_of_an_update_is_told_and_follows_from_all_that_was_added_up() -> None:
    from literal import SGD, clip

    for training in (replace(SGD, weight_decay=0.5), replace(ADAMW, weight_decay=0.5)):
        trial = trial_of(tiny_case("single", training))
        step, reference = trial.ranks[0].steps[0], trial.reference.steps[0]
        told = judged("update", with_value(trial, 0, 1, "parameters", WQ, lambda p: p + np.eye(4)))
        gradient = clip(reference.grad_norm, training) * np.abs(step.gradients[WQ])
        start, rate = np.abs(trial.ranks[0].parameters[1].value), reference.lr
        added = start * (1 + 0.5 * rate)
        added = added + rate * (gradient if training.optimizer == "sgd" else gradient / (gradient + training.eps))
        allowed = (64 + 8 * np.sqrt(236)) * 2.0**-53 * added
        at = np.unravel_index(np.argmax(np.eye(4) / allowed), (4, 4))
        first = told.findings[0]
        assert where(first) == (0, 1, WQ)
        assert first.bound == Bound(pytest.approx(allowed[at]))
        assert first.observed - first.expected == pytest.approx(1)
        assert first.note.startswith(f"entry {tuple(map(int, at))}, ") and first.note.endswith(
            "; 4 of 16 entries wrong"
        )


def test_a_check_that_raises_is_told_with_the_innermost_place() -> None:
    def deepest() -> None:
        raise KeyError("oops")

    def deeper() -> None:
        deepest()

    told = run_check("loss", lambda _: deeper(), trial_of(tiny_case("single")))  # type: ignore[arg-type, return-value]
    line = deepest.__code__.co_firstlineno + 1
    assert told.note == f"the check itself raised KeyError('oops') in deepest (test_verdicts.py:{line})"
