"""What is left when layout, data, gradients and updates match: replicas, repeats, order and traffic."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from caused import cause_of, causes_of
from diagnosed import NORM, accumulating, fsdp_4, kinds, received, reference_gradient
from literal import (
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_rank,
    with_step_1_gradients,
    with_value,
)

from harness.core.evidence.records import Collective
from harness.core.judge.trial import Trial

REPEATED = trial_of(tiny_case("fsdp_2", runs=2))


def by_a_bit(trial: Trial) -> Trial:
    return with_value(trial, 1, 2, "gradients", NORM, lambda gradient: np.nextafter(gradient, 1.0))


def test_replicas_that_drift_by_a_last_bit() -> None:
    trial = with_value(trial_of(tiny_case("hsdp_2x2")), 2, 2, "gradients", NORM, lambda g: np.nextafter(g, 1.0))
    cause = cause_of(trial)
    assert (cause.kind, cause.steps) == ("replicas drift", (2,)) and {0, 2} <= {*cause.ranks}


def test_the_reference_moved() -> None:
    trial = fsdp_4()
    accepted = replace(trial.golden, losses=[loss * 1.001 for loss in trial.golden.losses])
    assert kinds(replace(trial, golden=accepted)) == ("reference moved",)


@pytest.mark.parametrize(
    ("repeat", "rank", "step"),
    [
        (by_a_bit(received(REPEATED, 1, 2, [12, 13, 15, 14])), 1, 2),
        (received(REPEATED, 0, 3, [16, 17, 18, 18]), 0, 3),
        (by_a_bit(REPEATED), 1, 2),
    ],
)
def test_a_repeat_that_differs_is_not_deterministic(repeat: Trial, rank: int, step: int) -> None:
    cause = cause_of(replace(REPEATED, repeat=repeat.run))
    assert cause.kind == "not deterministic" and cause.finding is not None
    assert (cause.finding.rank, cause.finding.step) == (rank, step)


def test_a_reduction_after_every_microbatch() -> None:
    def twice(call: Collective) -> list[Collective]:
        return [call, call] if call.op == "all_reduce" and call.phase == "backward" else [call]

    cause = cause_of(with_every_rank(accumulating(), lambda t, rank: with_collectives(t, rank, twice)))
    assert (cause.kind, dict(cause.details)) == ("another feature", {"defer_sync": False})


def test_a_collective_that_one_rank_skips() -> None:
    trial = fsdp_4()
    cause = cause_of(with_rank(trial, 1, collectives=trial.ranks[1].collectives[:-1]))
    assert cause.kind == "collectives out of order" and {1} <= {*cause.ranks}


def test_collectives_in_another_order_are_named_beside_wrong_numbers() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_step_1_gradients(trial, lambda _, fqn: 2 * reference_gradient(trial, fqn))
    first = next(place for place, call in enumerate(trial.ranks[1].collectives) if call.phase == "other")
    calls = [*trial.ranks[1].collectives]
    calls[first] = replace(calls[first], dtype="int64")
    trial = with_rank(trial, 1, collectives=tuple(calls))
    assert [one.kind for one in causes_of(trial)] == ["gradients scaled", "collectives out of order"]


def test_what_is_gathered_between_backward_and_the_optimizer_is_traffic_of_no_plan() -> None:
    trial, whole = fsdp_4(), 8 * sum(math.prod(shape) for shape in fsdp_4().plan.shapes.values())
    for rank in trial.ranks:
        outside = Collective("all_gather", (0, 1, 2, 3), "0", "float64", whole, "other", 1, 99)
        trial = with_rank(trial, rank, collectives=(*trial.ranks[rank].collectives, outside))
    cause = cause_of(trial)
    assert (cause.kind, cause.steps) == ("traffic of no plan", (1,))
