"""What is left when layout, data, gradients and updates match: reports, replicas, repeats, traffic. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    DDP_2,
    NORM,
    accumulating,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    here,
    received,
    reference_gradient,
    seen,
    seen_text,
)
from harness.diagnosis.costs import of_no_plan, of_two_runs
from literal import (
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step_1_gradients,
    with_value,
    without_rank,
)

from harness.evidence.records import Collective
from harness.report.cause_text import cause_line

# ---- the rest


def test_replicas_that_drift_by_a_last_bit() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    expect(
        with_value(trial, 2, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0)),
        """\
replicas diverge: ranks [0,2], step 2, gradient of norm.weight: expected the same bytes on all, observed off by 2.05e-16 of the largest entry (on rank 2, compared with rank 0)
  why: within rounding of the reference, but replicas must be bitwise equal: a difference of one bit grows
  loss, gradients: equal to the reference within 2.1e-16: a loss-curve test passes here""",
    )


def test_the_reference_moved() -> None:
    trial = fsdp_4()
    accepted = replace(trial.golden, losses=[loss * 1.001 for loss in trial.golden.losses])
    expect(
        replace(trial, golden=accepted),
        """\
the reference moved, not the trainer: model, data, recipe or torch changed since the golden was accepted
  golden: step 1, loss: expected 2.53714290518703, observed 2.53460829689014 (expected: the golden, observed: the reference; bound 1.4e-14)""",
    )


def test_a_repeat_that_is_fed_its_samples_in_another_order() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_value(received(trial, 1, 2, [12, 13, 15, 14]), 1, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    expect_first(
        replace(trial, repeat=other.run),
        """two runs of the same case are not bitwise equal: the repeat received the same samples in another order (rank 1, step 2): rank 1, step 2, results that differ from the first run: expected 0, observed 1 (gradients of norm.weight)""",
    )


def test_a_repeat_that_is_fed_other_samples() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    expect_first(
        replace(trial, repeat=received(trial, 0, 3, [16, 17, 18, 18]).run),
        """two runs of the same case are not bitwise equal: the repeat received other samples (rank 0, step 3): rank 0, step 3, results that differ from the first run: expected 0, observed 1 (loss of microbatch 0)""",
    )


def test_a_repeat_that_differs() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_value(trial, 1, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    expect_first(
        replace(trial, repeat=other.run),
        """two runs of the same case are not bitwise equal: rank 1, step 2, results that differ from the first run: expected 0, observed 1 (gradients of norm.weight)""",
    )


def test_a_reduction_after_every_microbatch() -> None:
    def twice(call):
        return [call, call] if call.op == "all_reduce" and call.phase == "backward" else [call]

    trial = with_every_rank(accumulating(), lambda t, rank: with_collectives(t, rank, twice))
    expect_first(trial, """gradients are reduced after every microbatch (2 times a step), requested once a step""")


def test_a_collective_that_one_rank_skips() -> None:
    trial = fsdp_4()
    expect(
        with_rank(trial, 1, collectives=trial.ranks[1].collectives[:-1]),
        """\
ranks of a group do not issue the same collectives: ranks [0-3], collective 20: expected all_reduce of 8 B float64 (step 3, other) on every rank, observed nothing on rank 1
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


# ---- weights


def test_a_rank_that_reduces_in_another_order_is_told_beside_wrong_numbers() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_step_1_gradients(trial, lambda _, fqn: 2 * reference_gradient(trial, fqn))
    expect_first(
        with_collectives(trial, 1, first_other_as_integer()),
        """gradients are 2 times what they should be in every parameter, in step 1 alone: as if not divided by dp_shard (2); ranks of a group do not issue the same collectives: ranks [0,1], collective 6: expected all_reduce of 8 B float64 (step 1, other) on every rank, observed all_reduce of 8 B int64 (step 1, other) on rank 1""",
    )


def first_other_as_integer():
    done: list[int] = []

    def change(call):
        if call.phase != "other" or done:
            return (call,)
        done.append(1)
        return (replace(call, dtype="int64"),)

    return change


# ---- what is reported, and the way to right numbers


# ---- what the optimizer receives


def test_collectives_in_another_order_are_told_beside_wrong_numbers() -> None:
    found = seen(of_two_runs, fsdp_4(), "collective_order", "loss")
    assert found is not None and found.checks == ("collective_order",)
    assert (
        cause_line(found.cause)
        == "ranks of a group do not issue the same collectives: here: expected this, observed that"
    )
    assert found.cause.finding == here("collective_order")[1]
    assert not seen_text(of_two_runs, fsdp_4(), "loss")


@pytest.mark.parametrize(
    ("check", "told"),
    [
        ("process_groups", "process groups differ from the plan"),
        ("traffic", "traffic differs from the plan"),
        ("placements", "wrappers or placements differ from the plan"),
        ("memory", "memory held between steps differs from the plan"),
    ],
)
def test_a_structure_that_no_feature_explains_is_told_by_its_check(check: str, told: str) -> None:
    assert seen_text(of_no_plan, fsdp_4(), check) == f"{told}: here: expected this, observed that"
    assert not seen_text(of_no_plan, fsdp_4(), check, "gradients")


def test_what_is_gathered_between_backward_and_the_optimizer_is_told_by_its_collective() -> None:
    trial, whole = fsdp_4(), 8 * sum(math.prod(shape) for shape in fsdp_4().plan.shapes.values())
    for rank in trial.ranks:
        outside = Collective("all_gather", (0, 1, 2, 3), "0", "float64", whole, "other", 1, 99)
        trial = with_rank(trial, rank, collectives=(*trial.ranks[rank].collectives, outside))
    told = "by all_gather over dp_shard [0-3], the size of all parameters or all gradients"
    start = "traffic differs from the plan: rank 0, step 1, bytes moved outside forward and backward: "
    assert first_line(trial).startswith(start)
    assert told in first_line(trial)


# ---- the rest


def test_replicas_that_drift_beside_other_mistakes_are_not_explained_by_rounding() -> None:
    assert seen_text(of_two_runs, DDP_2, "replica_agreement") == "replicas diverge: here: expected this, observed that"
    assert not seen_text(of_two_runs, DDP_2, "replica_agreement", "gradients")


def test_a_repeat_that_lacks_a_rank_is_fed_other_samples_there() -> None:
    trial = trial_of(tiny_case("ddp_2", runs=2))
    trial = replace(trial, repeat=without_rank(trial, 1).run)
    told = "the repeat received other samples (rank 1, step 1)"
    assert told in seen_text(of_two_runs, trial, "determinism")
