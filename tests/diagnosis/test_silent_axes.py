"""Collectives of backward that did not run, and what is told of them. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from diagnosed import NORM, broken
from literal import EIGHT, tiny_case, trial_of, with_collectives, with_every_rank, with_rank, with_value

from harness.diagnosis.backward import (
    OF_ATTENTION,
    _no_exchange,
    _other_groups,
    silent_axes,
    wrong_backward,
)
from harness.diagnosis.hypothesis import NOT_TESTED, Fact
from harness.evidence.records import Collective
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.traffic.flow import OUTSIDE, Flow
from harness.spec.dims import ParallelDims

OF_GRADIENTS = ("gradients", "loss", "reported_loss")


def call(op: str, ranks: tuple[int, ...], phase: str = "backward", dtype: str = "float64", step: int = 1) -> Collective:
    return Collective(op, ranks, str(ranks), dtype, 64, phase, step, 0)


def without(trial: Trial, *dropped: tuple[str, str], ranks: tuple[int, ...] = (), step: int = 0) -> Trial:
    """No collective of these (op, phase) on these ranks (all) in this step (any)."""

    def kept(rank: int, one: Collective) -> list[Collective]:
        here = (not ranks or rank in ranks) and step in (0, one.step)
        return [] if here and (one.op, one.phase) in dropped else [one]

    return with_every_rank(trial, lambda t, rank: with_collectives(t, rank, lambda one: kept(rank, one)))


def off(trial: Trial, step: int = 1) -> Trial:
    return with_value(trial, 0, step, "gradients", NORM, lambda gradient: gradient + 0.1)


# ---- gradients over an axis


@pytest.mark.parametrize("step", [1, 2])
def test_an_axis_over_which_some_rank_reduces_nothing_in_a_step_is_silent(step: int) -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    assert silent_axes(trial, step) == {}
    all_reduce, scatter = ("all_reduce", "backward"), ("reduce_scatter", "backward")
    for ranks in ((), (2,)):
        lost = without(trial, all_reduce, ranks=ranks, step=step)
        assert silent_axes(lost, step) == {"dp_replicate": "all_reduce"}
        assert silent_axes(lost, 3) == {}
    both = {"dp_shard": "reduce_scatter", "dp_replicate": "all_reduce"}
    assert silent_axes(without(trial, all_reduce, scatter, ranks=(1,)), step) == both
    assert silent_axes(without(trial, ("all_gather", "backward"), ("all_gather", "forward")), step) == {}


def test_a_reduction_that_is_missing_is_named_with_its_axes_where_gradients_are_wrong_too() -> None:
    trial = off(trial_of(tiny_case("hsdp_2x2")))
    assert _other_groups(trial, [(0, NORM)], 1) is None
    lost = without(trial, ("all_reduce", "backward"), ("reduce_scatter", "backward"))
    found = _other_groups(lost, [(0, NORM)], 1)
    assert found is not None and found.cause.kind == "gradients not reduced"
    assert dict(found.cause.details) == {"axes": ("dp_shard", "dp_replicate")}
    assert {"traffic", "process_groups", "placements", "gradients", "replica_agreement"} <= {*found.checks}
    assert list(wrong_backward(lost, broken("gradients", "traffic"))) == [found]
    assert list(wrong_backward(lost, broken("gradients"))) == []


# ---- ranks that hold other slices


def test_of_another_layout_no_group_is_missing_that_the_plan_alone_has() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"), tiny_case(ParallelDims(dp_replicate=4)))
    lost = off(without(trial, ("all_reduce", "backward")))
    found = [fact.cause for fact in wrong_backward(lost, broken("gradients", "traffic"))]
    assert [(one.kind, dict(one.details)["axes"]) for one in found] == [
        ("gradients not reduced", ("dp_replicate", "dp_shard"))
    ]
    nan = with_value(lost, 1, 1, "gradients", NORM, lambda gradient: gradient * float("nan"))
    assert [fact.cause.kind for fact in wrong_backward(nan, broken("gradients", "traffic"))] == [
        "gradients not reduced",
        "not finite",
    ]


# ---- keys and values

NO_KEYS = "no K/V exchange over cp"
NO_GRADIENTS = "no exchange of K/V gradients over cp: each rank keeps its own"


def moving(trial: Trial, moved: Callable[[Flow], int]) -> Trial:
    """Each rank moves so many bytes of each planned flow, in every step."""

    def calls(rank: int) -> tuple[Collective, ...]:
        return tuple(
            replace(call(flow.op, trial.plan.group_of(rank, flow.axis), flow.phase, step=step), bytes=moved(flow))
            for step in (1, 2, 3)
            for flow in trial.plan.flows_of(rank, step)
            if flow.phase != OUTSIDE
        )

    return with_every_rank(trial, lambda t, rank: with_rank(t, rank, collectives=calls(rank)))


def lacking(*lost: tuple[str, str], more: int = 0) -> Callable[[Flow], int]:
    """Of these (role, phase) no more than that."""
    return lambda flow: more if (flow.role, flow.phase) in lost else flow.bytes


@pytest.mark.parametrize("rotation", ["alltoall", "allgather"])
@pytest.mark.parametrize(
    ("lost", "told"),
    [
        ([("keys and values", "forward"), ("keys and values", "backward")], NO_KEYS),
        ([("keys and values", "forward")], NO_KEYS),
        ([("gradients of keys and values", "backward")], NO_GRADIENTS),
        ([("gradients of keys and values", "backward"), ("keys and values", "forward")], NO_KEYS),
        ([("gradients of keys and values", "backward"), ("keys and values", "backward")], NO_GRADIENTS),
        ([("keys and values", "backward")], ""),
        ([("gradients", "backward"), ("parameters", "forward")], ""),
        ([], ""),
    ],
)
def test_a_flow_of_attention_of_which_nothing_is_seen_beside_what_else_runs_there_is_no_exchange(
    rotation: str, lost: list[tuple[str, str]], told: str
) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), EIGHT, cp_rotation=rotation))
    silent = moving(trial, lacking(*lost))
    found = _no_exchange(off(silent), [(0, NORM)], 1)
    checks = ("traffic", "exchange", "reshard", "features")
    if not told:
        assert found is None and _no_exchange(silent, [], 1) is None
        return
    assert found == Fact(Cause("K/V not exchanged", told), (*checks, *OF_GRADIENTS), NOT_TESTED)
    alone = _no_exchange(silent, [], 1)
    assert alone is not None and (alone.cause, alone.checks) == (found.cause, checks)
    assert {label for label, _ in alone.lines} == {"traffic"} and all("over cp in" in text for _, text in alone.lines)
    (place,) = [place for place, text in OF_ATTENTION.items() if text == told]
    assert _no_exchange(moving(trial, lacking(place, more=2)), [], 1) is None
