"""Another parallel layout than the one requested, and modules left out of one. Literal evidence, no ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import EMBEDDING, LAST, NORM, broken, dims, fsdp_4
from literal import ADAMW, TINY, UNEVEN, judged, of_layout_alone, tiny_case, trial_of, with_parameter, with_rank

from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.measured import MeasuredTraits
from harness.core.causes import diagnose
from harness.core.causes.hypothesis import Hypothesis
from harness.core.causes.layouts import PLAN_FIELDS_BY_RANK, Layout, candidate_layouts, other_layouts, renumber_trial
from harness.core.causes.structure_facts import facts_of_structure as facts
from harness.core.checks import judge
from harness.core.evidence.records import Exit
from harness.core.judge.result import Cause, Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Kept
from harness.core.plan.slices import slices_of_rank

WIDE = replace(TINY, dim=16, vocab_size=16, ffn_dim=32)
UP, DOWN = "layers.0.feed_forward.w1.weight", "layers.0.feed_forward.w2.weight"  # TP cuts into rows, into columns
DP = ("pp", "dp_shard", "dp_replicate", "cp", "tp")


def right(of: ParallelDims, **changes: Any) -> Trial:
    return trial_of(tiny_case(of, replace(ADAMW, global_batch=16), model=WIDE, **changes))


def held_as(trial: Trial, ran: ParallelDims, rank_of: Iterable[int]) -> Trial:
    """Rank r holds what rank_of[r] would hold under `ran`."""
    for rank, other in enumerate(rank_of):
        for fqn, part in slices_of_rank(ran, other, trial.plan.shapes).items():
            value = trial.reference.weights[fqn][tuple(slice(*ends) for ends in part)]
            trial = with_parameter(trial, rank, fqn, value=value)
    return trial


def with_rows(trial: Trial, fqn: str, rows: Mapping[int, tuple[int, int]]) -> Trial:
    """By rank, from which row of a parameter to which it holds."""
    for rank, (start, stop) in rows.items():
        trial = with_parameter(trial, rank, fqn, value=trial.reference.weights[fqn][start:stop])
    return trial


def proposed(trial: Trial, *checks: str) -> list[Hypothesis]:
    return list(other_layouts(trial, broken(*(checks or ("shard_contents",)))))


def assumed(one: Hypothesis, trial: Trial) -> Trial:
    assert one.assume is not None
    found = one.assume(trial)
    assert judged("shard_contents", found).verdict is Verdict.PASS
    return found


def cause_of(trial: Trial) -> Cause:
    """The only cause, which explains all checks that fail."""
    results = judge(trial)
    found = diagnose(trial, results)
    assert found is not None and len(found.causes) == 1, found
    failed = {result.check for result in results if result.verdict is Verdict.FAIL}
    assert set(found.causes[0].explains) == failed
    return found.causes[0]


# ---- of all parameters


@pytest.mark.slow("many of a kind; the first run in the same way", after=4)
@pytest.mark.parametrize(
    ("requested", "ran", "named"),
    [
        (dims(2, 2), dims(1, 4), "HSDP ran as FSDP"),
        (dims(2, 8), dims(1, 16), "HSDP ran as FSDP"),
        (dims(2, 2), dims(4, 1), "HSDP ran as DDP"),
        (dims(1, 2), dims(2, 1), "FSDP ran as DDP"),
        (dims(4), dims(1, 4), "DDP ran as FSDP"),
        (dims(1, 4), dims(2, 2), "FSDP ran as HSDP"),
        (dims(2, 4), dims(4, 2), "HSDP ran with other degrees"),
    ],
)
@pytest.mark.parametrize("model", [WIDE, UNEVEN])
def test_degrees_that_ran_are_named_with_those_requested(
    requested: ParallelDims, ran: ParallelDims, named: str, model: Any
) -> None:
    training = replace(ADAMW, global_batch=16)
    cause = cause_of(trial_of(*(tiny_case(of, training, model=model) for of in (requested, ran))))
    assert (cause.kind, cause.details) == ("another layout", tuple(vars(ran).items()))
    assert cause.observed.startswith(f"{named}: ")


@pytest.mark.parametrize(
    ("requested", "ran", "rank_of", "details", "fitted"),
    [
        (dims(2, 4), dims(4, 2), [0, 0, 0, 0, 1, 1, 1, 1], {"dp_replicate": 4, "dp_shard": 2, "order": DP}, 2),
        (dims(1, 2, 2), dims(1, 4), [0, 1, 2, 3], {"without": "tp", "folded": True}, 1),
        (dims(tp=2), dims(), [0, 0], {"without": "tp", "folded": False}, 1),
        (dims(1, 2, 2), dims(1, 2), [0, 0, 1, 1], {"without": "tp", "folded": False}, 1),
        (dims(1, 2, 2), dims(), [0] * 4, {"dp_replicate": 2, "dp_shard": 1, "without": "tp", "folded": False}, 2),
        (dims(1, 2, 2), dims(tp=2), [0, 1, 0, 1], {"dp_replicate": 2, "dp_shard": 1}, 1),
        (ParallelDims(dp_shard=2, cp=2), dims(1, 2), [0, 0, 1, 1], {"without": "cp", "folded": False}, 1),
    ],
)
def test_what_ranks_hold_is_fitted_by_a_layout(
    requested: ParallelDims, ran: ParallelDims, rank_of: list[int], details: dict[str, Any], fitted: int
) -> None:
    trial = held_as(right(requested), ran, rank_of)
    first = min(proposed(trial), key=lambda one: one.fitted_count)
    seen = {name: value for name, value in first.cause.details if value != getattr(requested, name, None)}
    assert (first.cause.kind, seen, first.fitted_count) == ("another layout", details, fitted)
    assert assumed(first, trial) and proposed(trial, "placements") and not proposed(trial, "traffic")


@pytest.mark.slow("many of a kind; the first run in the same way", after=4)
@pytest.mark.parametrize("requested", [dims(2, 2, 2), dims(2, 1, 4), dims(1, 4, 2), dims(2, 4, 1)], ids=str)
@pytest.mark.parametrize("order", list(itertools.permutations(("dp_replicate", "dp_shard", "tp")))[1:], ids="-".join)
def test_axes_in_the_wrong_order(order: tuple[str, ...], requested: ParallelDims) -> None:
    of = [axis for axis in order if getattr(requested, axis) > 1]
    if of == [axis for axis in AXES if axis in of] or not {"dp_shard", "tp"} & {*of}:
        return
    there = iter(of)
    layout = Layout(requested, tuple(next(there) if axis in of else axis for axis in AXES))
    trial = right(requested)
    other = renumber_trial(trial, {layout.usual_rank(rank): rank for rank in trial.ranks})
    assert other.ranks[1].rank == 1 and len(other.ranks) == len(trial.ranks)
    cause = cause_of(other)
    assert (cause.kind, dict(cause.details)["order"]) == ("another layout", layout.order)


@pytest.mark.parametrize(
    ("requested", "counts"),
    [(dims(), {}), (dims(tp=2), {1: 2}), (dims(2, 2), {1: 3, 2: 2}), (dims(1, 2, 2), {1: 4, 2: 3})],
)
def test_layouts_of_one_choice_come_before_those_of_two(requested: ParallelDims, counts: dict[int, int]) -> None:
    found = [count for count, _ in candidate_layouts(requested)]
    assert found == sorted(found) and {count: found.count(count) for count in found} == counts


@pytest.mark.parametrize("recorded", [True, False])
def test_where_slices_are_not_derived_other_degrees_alone_are_put_to_the_test(recorded: bool) -> None:
    trial = right(dims(2, 2, tp=2))
    unknown = of_layout_alone(trial) if recorded else trial
    unknown = replace(unknown, plan=replace(unknown.plan, slices={rank: {} for rank in trial.ranks}))
    found = [dict(one.cause.details)["dp_shard"] for one in proposed(unknown, "placements")]
    assert found == [1, 4] * recorded and proposed(unknown) == []


def test_slices_of_no_layout_are_told_as_seen_and_strange_values_are_no_layout() -> None:
    trial = fsdp_4()
    trial = with_parameter(trial, 2, LAST, value=trial.reference.weights[LAST][1:3])
    assert proposed(trial) == []
    failed = {"shard_contents": judged("shard_contents", trial)}
    (fact,) = facts(trial, failed)
    assert (fact.cause.kind, fact.checks) == ("other slices", ("shard_contents", "placements"))
    assert fact.cause.finding is not None and fact.cause.finding.ranks == (2,)
    assert list(facts(trial, failed | broken("initial_weights"))) == []
    draw = np.random.default_rng(1)
    for fqn in trial.plan.shapes:
        trial = with_parameter(trial, 1, fqn, value=draw.normal(size=trial.ranks[1].parameters[0].value.shape))
    assert proposed(trial) == []


# ---- the plan of a layout


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    ("layout", "known", "place_of", "groups"),
    [
        (
            Layout(dims(2, 2, tp=2), without="tp"),
            dims(2, 2),
            [0, 0, 1, 1, 2, 2, 3, 3],
            {"dp_replicate": ((0, 4), (2, 6), (1, 5), (3, 7)), "dp_shard": ((0, 2), (4, 6), (1, 3), (5, 7))},
        ),
        (
            Layout(dims(2, 2, tp=2), without="tp", folded=True),
            dims(2, 4),
            [*range(8)],
            {"dp_replicate": ((0, 4), (1, 5), (2, 6), (3, 7)), "dp_shard": ((0, 1, 2, 3), (4, 5, 6, 7))},
        ),
        (
            Layout(ParallelDims(dp_shard=2, cp=2), without="cp"),
            dims(1, 2),
            [0, 0, 1, 1],
            {"dp_shard": ((0, 2), (1, 3))},
        ),
        (Layout(ParallelDims(cp=2, tp=2), without="tp"), ParallelDims(cp=2), [0, 0, 1, 1], {"cp": ((0, 2), (1, 3))}),
        (Layout(ParallelDims(cp=2, tp=2), without="cp"), dims(tp=2), [0, 1, 0, 1], {"tp": ((0, 1), (2, 3))}),
    ],
)
def test_the_plan_of_a_layout_is_that_of_the_known_axes_and_of_cp_keys_and_values_too(
    layout: Layout, known: ParallelDims, place_of: list[int], groups: dict[str, Any], wrapper: str
) -> None:
    trial = right(layout.dims, wrapper=wrapper)
    traits = replace(trial.traits, measured=MeasuredTraits(trial.plan.measured_units or {}, torch="2.9.0"))
    trial = replace(trial, plan=replace(trial.plan, traits=traits))
    plan, own = layout.assume(trial).plan, trial.plan
    wanted = make_plan(replace(trial.case, dims=known), trial.traits)
    assert layout.known_dims == known
    assert plan.groups == groups | {layout.without: own.groups[layout.without]}
    assert (plan.dims, plan.traits, plan.shard_axis) == (own.dims, own.traits, wanted.shard_axis)
    assert dict(plan.outside_bytes) == dict(own.outside_bytes)
    for key, (rank, place) in itertools.product(PLAN_FIELDS_BY_RANK, enumerate(place_of)):
        more = getattr(own, key)[rank] if layout.without == "cp" and "flows" in key else ()
        between = tuple(flow for flow in more if "keys and values" in flow.role)
        of_known = getattr(wanted, key)[place]
        assert getattr(plan, key)[rank] == (of_known + between if between else of_known), key
        assert bool(between) == bool(more)


def test_of_other_degrees_and_order_the_plan_is_that_of_these_and_ranks_have_other_numbers() -> None:
    trial, layout = right(dims(1, 4)), Layout(dims(2, 2), DP)
    other = layout.assume(trial)
    assert other.case == replace(trial.case, dims=dims(2, 2)) and other.plan == make_plan(other.case, trial.traits)
    for rank, there in enumerate([0, 2, 1, 3]):
        pairs = zip(other.ranks[there].parameters, trial.ranks[rank].parameters, strict=True)
        assert all((one.value == own.value).all() for one, own in pairs)


# ---- of some parameters only


def test_what_fsdp_left_out_is_gathered_by_nobody_and_kept_whole_by_each() -> None:
    trial = with_rows(right(dims(shard=2)), NORM, dict.fromkeys((0, 1), (0, 16)))
    trial = replace(
        trial, plan=replace(trial.plan, traits=replace(trial.traits, measured=MeasuredTraits({}, torch="2.9.0")))
    )
    (one,) = proposed(trial)
    assert (one.cause.kind, one.fitted_count) == ("left out of a wrapper", 2)
    assert one.cause.details == (("left_out", "FSDP"), ("parameters", (NORM,)))
    plan, before = assumed(one, trial).plan, trial.plan
    assert (plan.measured_units, plan.traits) == ({}, before.traits)
    for rank in (0, 1):
        assert plan.slices[rank] == before.slices[rank] | {NORM: ((0, 16),)}
        assert plan.after_forward[rank] == before.after_forward[rank] | {NORM: Kept(2, 16 * 8)}
        assert plan.parameter_bytes[rank] == tuple(size + 8 * 8 for size in before.parameter_bytes[rank])
        assert not any(NORM in unit for unit in plan.units[rank])
        flows = (of.flows[rank] for of in (before, plan))
        all_, left = (sum(f.bytes for f in of if (f.op, f.phase) == ("all_gather", "forward")) for of in flows)
        assert all_ - left == 16 * 8


def test_what_tp_left_out_is_gathered_by_fsdp_as_ever() -> None:
    trial = with_rows(right(dims(1, 2, 2)), LAST, {rank: (8 * (rank // 2), 8 * (rank // 2) + 8) for rank in range(4)})
    (one,) = proposed(trial)
    assert one.cause.details == (("left_out", "TP"), ("parameters", (LAST,)))
    plan = assumed(one, trial).plan
    assert plan.units == trial.plan.units and plan.slices[3][LAST] == ((8, 16), (0, 16))


def test_another_layout_of_some_parameters_only_is_told_with_these() -> None:
    trial, quarters = right(dims(2, 2)), {rank: (4 * rank, 4 * rank + 4) for rank in range(4)}
    trial = with_rows(with_rows(trial, LAST, quarters), EMBEDDING, quarters)
    (one,) = proposed(trial)
    assert one.cause.details == (("left_out", ""), ("parameters", (EMBEDDING, LAST)))
    plan, before = assumed(one, trial).plan, trial.plan
    assert plan.units == before.units and plan.flows == before.flows
    assert plan.after_forward[0] == before.after_forward[0] | {EMBEDDING: Kept(2, 4 * 16 * 8)}  # the last stays whole


STRIDED = {rank: (4 * rank, 4 * rank + 4) for rank in range(4)}  # rank = 2 * dp_shard + tp


def test_rows_dealt_out_in_strides_are_told_and_what_tp_ranks_gather_is_assumed_to_be_the_weights() -> None:
    trial = with_rows(right(dims(1, 2, 2)), LAST, STRIDED)
    one, *others = proposed(trial)
    assert (one.cause.kind, one.fitted_count) == ("strided shards", 1) and one.cause.details == (
        ("parameters", (LAST,)),
    )
    assert [other.cause.kind for other in others] == ["left out of a wrapper"]
    before, after = trial.reference.weights, assumed(one, trial).reference.weights
    assert np.array_equal(after[LAST], before[LAST][[*range(4), *range(8, 12), *range(4, 8), *range(12, 16)]])
    assert all(np.array_equal(after[fqn], before[fqn]) for fqn in before if fqn != LAST)


def test_rows_are_not_in_strides_where_one_rank_holds_others_or_a_matrix_is_cut_into_columns_or_flat() -> None:
    strided = with_rows(right(dims(1, 2, 2)), LAST, STRIDED)
    columns = strided
    for rank in range(4):
        columns = with_parameter(columns, rank, DOWN, value=strided.reference.weights[DOWN][4 * rank : 4 * rank + 4])
    flat = with_rows(right(dims(1, 2, 2), wrapper="fsdp1"), LAST, {r: (64 * r, 64 * r + 64) for r in range(4)})
    alone = with_rows(right(dims(1, 4)), LAST, {0: (0, 4), 1: (8, 12), 2: (4, 8), 3: (12, 16)})
    nowhere = with_parameter(strided, 3, LAST, value=np.full((4, 16), 7.0))
    for trial in (with_rows(strided, LAST, {3: (11, 15)}), columns, flat, alone, nowhere):
        assert "strided shards" not in [one.cause.kind for one in proposed(trial)]
    both = with_rows(strided, UP, {rank: (8 * rank, 8 * rank + 8) for rank in range(4)})
    assert proposed(both)[0].cause.details == (("parameters", (UP, LAST)),)


# ---- other numbers


def test_each_rank_is_renamed_wherever_it_is_named() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    names = {0: 1, 1: 3, 2: 0, 3: 2}
    wrapper, call = next(iter(trial.ranks[0].structure.values())), trial.ranks[0].collectives[0]
    calls = (replace(call, ranks=(0, 1), peer=3), replace(call, ranks=(0, 1, 2), peer=None), replace(call, peer=9))
    tensor, group = trial.ranks[0].parameters[0], trial.ranks[0].groups[0]
    changed = with_rank(
        trial,
        0,
        collectives=calls,
        structure={"": replace(wrapper, shard_ranks=(0, 2), replicate_ranks=(1,))},
        parameters=(replace(tensor, mesh=[[0, 1], [2, 3]]), replace(tensor, mesh=None)),
        groups=(replace(group, ranks=(0, 1)), replace(group, ranks=(1, 3))),
    )
    run = replace(changed.run, exits=tuple(Exit(rank, "raised", rank) for rank in range(4)))
    other = renumber_trial(replace(trial, run=run, repeat=run), names)
    assert [evidence.rank for evidence in other.ranks.values()] == [*other.ranks] == [0, 1, 2, 3]
    assert [(exit.rank, exit.code) for exit in other.run.exits] == [(0, 2), (1, 0), (2, 3), (3, 1)]
    seen = other.ranks[1]
    assert [(one.ranks, one.peer) for one in seen.collectives[:2]] == [((1, 3), 2), ((0, 1, 3), None)]
    assert seen.collectives[2].peer == 9
    assert [one.mesh for one in seen.parameters] == [[[1, 3], [0, 2]], None]
    assert [one.ranks for one in seen.groups] == [(1, 3), (2, 3)]
    assert [(one.shard_ranks, one.replicate_ranks) for one in seen.structure.values()] == [((0, 1), (3,))]
    assert other.repeat == other.run
    assert renumber_trial(other, {new: old for old, new in names.items()}).run.exits == run.exits
