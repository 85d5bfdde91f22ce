"""The checks `gradients` and `replica_agreement`. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import EMBEDDING, NORM, WQ, bounds_of, findings, like, where
from literal import (
    ADAMW,
    SGD,
    UNEVEN,
    judged,
    last_bit,
    tiny_case,
    trial_of,
    with_rank,
    with_step,
    with_value,
)

from harness.core.case.dims import ParallelDims
from harness.core.checks.replica_agreement import replica_families
from harness.core.judge.finding import Bound
from harness.core.judge.result import Verdict
from harness.core.plan.slices import numel

# ---- gradients


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_a_gradient_scaled_by_one_and_1e_8_is_found(step: int, training) -> None:
    trial = trial_of(tiny_case("hsdp_2x2", training))
    part = trial.ranks[3].steps[step - 1].gradients[WQ]
    largest = np.abs(part).max() / np.abs(trial.reference.steps[step - 1].gradients[WQ]).max()
    assert findings("gradients", with_value(trial, 3, step, "gradients", WQ, lambda g: g * (1 + 1e-8))) == (
        like(
            3,
            "the reference's",
            pytest.approx(1e-8 * largest),
            unit="of the largest entry",
            step=step,
            kind="parameter",
            name=WQ,
            bound=Bound(bounds_of(trial).gradient[step]),
        ),
    )


@pytest.mark.parametrize(
    "change",
    [
        lambda g: g * np.nan,
        lambda g: np.where(np.arange(g.size).reshape(g.shape) == 3, np.nan, g),
        lambda g: g[:1],
        lambda g: g.reshape(-1),
    ],
    ids=["NaN", "one NaN", "too few rows", "flat"],
)
def test_a_gradient_that_cannot_be_compared_is_infinitely_far(change) -> None:
    (finding,) = findings("gradients", with_value(trial_of(tiny_case("fsdp_2")), 1, 3, "gradients", WQ, change))
    assert (finding.observed, finding.unit) == (np.inf, "of the largest entry")


@pytest.mark.parametrize(
    "change",
    [lambda g: g.astype(np.float32), lambda g: 0 * g, lambda g: -g, lambda g: g[::-1]],
    ids=["rounded to float32", "zero", "negated", "rows in another order"],
)
def test_a_gradient_that_is_another_is_found(change) -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 1, 3, "gradients", WQ, change)
    assert [where(finding) for finding in findings("gradients", trial)] == [(1, 3, WQ)]


def test_the_worst_gradient_is_shown_first() -> None:
    trial = with_value(trial_of(tiny_case("fsdp_2")), 0, 1, "gradients", WQ, lambda g: 1.001 * g)
    trial = with_value(trial, 1, 3, "gradients", NORM, lambda g: 5 * g)
    assert [where(finding) for finding in findings("gradients", trial)] == [(1, 3, NORM), (0, 1, WQ)]


# ---- replica_agreement


@pytest.mark.parametrize("what", ["gradients", "parameters"])
def test_a_replica_that_differs_in_its_last_bit_is_found(what: str) -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    value = getattr(trial.ranks[1].steps[2], what)[WQ]
    away = np.abs(last_bit(value) - value).max() / np.abs(value).max()
    assert 0 < away < 3e-16
    assert findings("replica_agreement", with_value(trial, 3, 3, what, WQ, last_bit)) == (
        like(
            (1, 3),
            "the same bytes on all",
            away,
            unit="of the largest entry",
            step=3,
            kind="parameter",
            name=WQ,
            quantity={"gradients": "gradient", "parameters": "value"}[what],
            note="on rank 3, compared with rank 1",
        ),
    )


def test_tensor_parallel_norms_are_replicas_too() -> None:
    trial = with_value(trial_of(tiny_case("tp_2")), 1, 1, "gradients", NORM, lambda g: 3 * g)
    (finding,) = findings("replica_agreement", trial)
    assert (where(finding), finding.expected) == (((0, 1), 1, NORM), "the same bytes on all")


def test_replicas_are_of_what_has_a_place_in_the_model_and_is_not_empty() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_replicate=2, dp_shard=4), model=UNEVEN))  # the fourth shards are empty
    assert [t.fqn for t in trial.ranks[3].parameters if not t.value.size]
    assert all(numel(part) for _, part in replica_families(trial))
    for rank, evidence in trial.ranks.items():
        buffer = replace(evidence.parameters[0], fqn="a.buffer", value=np.ones(3))
        trial = with_rank(trial, rank, parameters=(*evidence.parameters, buffer))
    assert "a.buffer" not in {fqn for fqn, _ in replica_families(trial)}
    assert judged("replica_agreement", trial).verdict == Verdict.PASS


def test_how_far_a_replica_is_from_one_that_is_zero_is_told_as_it_is() -> None:
    trial = with_value(trial_of(tiny_case("ddp_2")), 0, 1, "gradients", NORM, np.zeros_like)
    trial = with_value(trial, 1, 1, "gradients", NORM, lambda g: np.full_like(g, 0.5))
    first = findings("replica_agreement", trial)[0]
    assert (first.observed, first.unit, first.note) == (0.5, "of the largest entry", "on rank 1, compared with rank 0")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_replica_without_a_gradient_does_not_agree_and_is_the_one_that_is_named(rank: int) -> None:
    trial = trial_of(tiny_case("ddp_2"))
    rest = {fqn: g for fqn, g in trial.ranks[rank].steps[0].gradients.items() if fqn != WQ}
    (finding,) = findings("replica_agreement", with_step(trial, rank, 1, gradients=rest))
    assert (where(finding), finding.observed, finding.note) == (
        ((0, 1), 1, WQ),
        None,
        f"on rank {rank}, compared with rank {1 - rank}",
    )


def test_replicas_that_hold_other_slices_than_planned_were_not_compared() -> None:
    result = judged("replica_agreement", trial_of(tiny_case("ddp_2"), tiny_case("fsdp_2")))
    assert result.verdict == Verdict.UNKNOWN
    assert result.note.startswith(
        f"ranks [0,1] should hold the same slice of {EMBEDDING} and do not (12 of 12 such slices)"
    )


def test_replicas_are_not_judged_where_the_plan_has_none() -> None:
    assert judged("replica_agreement", trial_of(tiny_case("fsdp_2"))).verdict == Verdict.NOT_APPLICABLE
