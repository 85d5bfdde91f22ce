"""Which other layouts there are, what ranks hold under one, and the plan that is assumed where it is the one that ran."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from literal import ADAMW, TINY, tiny_case, trial_of

from harness.diagnosis.layout import BY_RANK, Layout, _layouts
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.spec.dims import ParallelDims
from harness.spec.measured import Measured

VARIED = replace(ADAMW, global_batch=16, seq_len=16, variable_length=True)
EVEN = replace(TINY, dim=16, n_heads=4, n_kv_heads=4, vocab_size=16, ffn_dim=16)


def dims(replicate: int = 1, shard: int = 1, cp: int = 1, tp: int = 1) -> ParallelDims:
    return ParallelDims(dp_replicate=replicate, dp_shard=shard, cp=cp, tp=tp)


def right(of: ParallelDims, **changes: Any) -> Trial:
    return trial_of(tiny_case(of, VARIED, model=EVEN, **changes))


def short(layout: Layout) -> str:
    """dp_replicate x dp_shard, the order of axes if it is another one, and what nothing is cut along."""
    order = " ".join(layout.order) if layout.order != Layout(layout.dims).order else ""
    without = f"without {layout.without}{' folded' * layout.folded}" if layout.without else ""
    return " ".join(part for part in (f"{layout.dims.dp_replicate}x{layout.dims.dp_shard}", order, without) if part)


SHARD_TP = "pp dp_replicate tp cp dp_shard"
DP = "pp dp_shard dp_replicate cp tp"


@pytest.mark.parametrize(
    ("requested", "others"),
    [
        (dims(), []),
        (dims(cp=2), [(1, "1x1 without cp")]),
        (dims(tp=2), [(1, "1x1 without tp"), (1, "1x1 without tp folded")]),
        (dims(2, 2), [(1, "4x1"), (1, "1x4"), (1, f"2x2 {DP}"), (2, f"4x1 {DP}"), (2, f"1x4 {DP}")]),
        (dims(1, 2, cp=2), [(1, "2x1"), (1, "1x2 without cp"), (2, "2x1 without cp")]),
        (dims(3), [(1, "1x3")]),
        (
            dims(1, 2, tp=2),
            [
                *[(1, "2x1"), (1, "1x2 without tp"), (1, "1x2 without tp folded"), (1, f"1x2 {SHARD_TP}")],
                *[(2, "2x1 without tp"), (2, "2x1 without tp folded"), (2, f"2x1 {SHARD_TP}")],
            ],
        ),
        (
            dims(2, cp=2, tp=2),
            [
                *[(1, "1x2"), (1, "2x1 without tp"), (1, "2x1 without cp"), (1, "2x1 without tp folded")],
                *[(1, "2x1 pp tp dp_shard cp dp_replicate"), (2, "1x2 without tp"), (2, "1x2 without cp")],
                *[(2, "1x2 without tp folded"), (2, "1x2 pp tp dp_shard cp dp_replicate")],
            ],
        ),
    ],
    ids=str,
)
def test_layouts_of_one_choice_come_before_those_of_two(requested: ParallelDims, others: list[tuple[int, str]]) -> None:
    found = list(_layouts(requested))
    assert [(count, short(layout)) for count, layout in found] == others
    assert all((layout.dims.cp, layout.dims.tp) == (requested.cp, requested.tp) for _, layout in found)


def test_three_axes_are_laid_out_in_five_other_orders() -> None:
    orders = [layout.order for count, layout in _layouts(dims(2, 2, tp=2)) if count == 1 and not layout.without]
    shown = [" ".join(axis for axis in order if axis not in ("pp", "cp")) for order in orders]
    assert shown == [
        *["dp_replicate dp_shard tp"] * 2,  # of other degrees
        *["dp_replicate tp dp_shard", "dp_shard dp_replicate tp", "dp_shard tp dp_replicate"],
        *["tp dp_replicate dp_shard", "tp dp_shard dp_replicate"],
    ]
    assert {(order[0], order[3]) for order in orders} == {("pp", "cp")}


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize("of", [dims(1, 2, tp=2), dims(2, 2), dims(1, 2, cp=2)], ids=str)
def test_the_layout_requested_is_that_of_the_plan(of: ParallelDims, wrapper: str) -> None:
    trial = right(of, wrapper=wrapper)
    for rank, held in trial.plan.slices.items():
        assert Layout(of).slices(rank, trial.plan) == held
    assert Layout(of).assume(trial) == trial


@pytest.mark.parametrize("wrapper", ["fsdp2", "fsdp1"])
@pytest.mark.parametrize(
    ("layout", "known", "place_of"),
    [
        (Layout(dims(1, 2, tp=2), without="tp"), dims(1, 2), [0, 0, 1, 1]),
        (Layout(dims(1, 2, tp=2), without="tp", folded=True), dims(1, 4), [0, 1, 2, 3]),
        (Layout(dims(1, 2, cp=2), without="cp"), dims(1, 2), [0, 0, 1, 1]),
        (Layout(dims(1, 1, cp=2, tp=2), without="tp", folded=True), dims(cp=4), [0, 1, 2, 3]),
        (Layout(dims(1, 1, cp=2, tp=2), without="cp"), dims(tp=2), [0, 1, 0, 1]),
        (Layout(dims(4), tuple(DP.split())), dims(4), [0, 1, 2, 3]),
        (Layout(dims(2, 2), tuple(DP.split())), dims(2, 2), [0, 2, 1, 3]),
        (Layout(dims(1, 2, tp=2), tuple(SHARD_TP.split())), dims(1, 2, tp=2), [0, 2, 1, 3]),
        (
            Layout(dims(2, 2, tp=2), ("pp", "tp", "dp_replicate", "cp", "dp_shard")),
            dims(2, 2, tp=2),
            [0, 2, 4, 6, 1, 3, 5, 7],
        ),
    ],
    ids=str,
)
def test_under_a_layout_each_rank_holds_what_a_rank_of_the_known_axes_does(
    layout: Layout, known: ParallelDims, place_of: list[int], wrapper: str
) -> None:
    own, wanted = (right(of, wrapper=wrapper).plan for of in (layout.dims, known))
    assert layout.known == known
    if layout.known.tp == layout.dims.tp or wrapper == "fsdp2":
        assert [layout.slices(rank, own) for rank in own.slices] == [wanted.slices[place] for place in place_of]
    assert [layout.known_place(layout.place(rank)) for rank in own.slices] == place_of


@pytest.mark.parametrize(
    ("layout", "known", "place_of", "groups"),
    [
        (
            Layout(dims(2, 2, tp=2), without="tp"),
            dims(2, 2),
            [0, 0, 1, 1, 2, 2, 3, 3],
            {
                "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
                "dp_replicate": ((0, 4), (2, 6), (1, 5), (3, 7)),
                "dp_shard": ((0, 2), (4, 6), (1, 3), (5, 7)),
            },
        ),
        (
            Layout(dims(2, 2, tp=2), without="tp", folded=True),
            dims(2, 4),
            [*range(8)],
            {
                "tp": ((0, 1), (2, 3), (4, 5), (6, 7)),
                "dp_replicate": ((0, 4), (1, 5), (2, 6), (3, 7)),
                "dp_shard": ((0, 1, 2, 3), (4, 5, 6, 7)),
            },
        ),
        (
            Layout(dims(1, 2, cp=2), without="cp"),
            dims(1, 2),
            [0, 0, 1, 1],
            {"cp": ((0, 1), (2, 3)), "dp_shard": ((0, 2), (1, 3))},
        ),
        (
            Layout(dims(1, 1, cp=2, tp=2), without="tp"),
            dims(cp=2),
            [0, 0, 1, 1],
            {"tp": ((0, 1), (2, 3)), "cp": ((0, 2), (1, 3))},
        ),
        (
            Layout(dims(1, 1, cp=2, tp=2), without="cp"),
            dims(tp=2),
            [0, 1, 0, 1],
            {"cp": ((0, 2), (1, 3)), "tp": ((0, 1), (2, 3))},
        ),
    ],
    ids=str,
)
def test_the_plan_of_a_layout_is_that_of_the_known_axes_and_of_cp_keys_and_values_too(
    layout: Layout, known: ParallelDims, place_of: list[int], groups: dict[str, Any]
) -> None:
    trial = right(layout.dims)
    traits = replace(trial.traits, measured=Measured(trial.plan.observed or {}, torch="2.9.0"))
    trial = replace(trial, plan=replace(trial.plan, traits=traits))
    plan, own = layout.assume(trial).plan, trial.plan
    wanted = make_plan(replace(trial.case, dims=known), trial.traits)
    assert plan.groups == groups and plan.shard_axis == wanted.shard_axis
    assert (plan.dims, plan.torch, plan.observed, plan.traits) == (own.dims, "2.9.0", own.observed, own.traits)
    assert dict(plan.outside_bytes) == dict(own.outside_bytes)
    for key in BY_RANK:
        seen = getattr(plan, key)
        assert [*seen] == [*range(len(place_of))], key
        for rank, place in enumerate(place_of):
            more = getattr(own, key)[rank] if layout.without == "cp" and "flows" in key else ()
            between = tuple(flow for flow in more if flow.role in ("keys and values", "gradients of keys and values"))
            of_known = getattr(wanted, key)[place]
            assert seen[rank] == (of_known + between if between else of_known), key
            assert len(between) == (3 if more else 0)


def test_of_a_layout_of_other_degrees_and_order_the_plan_is_that_of_these_and_ranks_have_other_numbers() -> None:
    trial = right(dims(1, 4))
    layout = Layout(dims(2, 2), tuple(DP.split()))
    assumed = layout.assume(trial)
    assert assumed.case == replace(trial.case, dims=dims(2, 2))
    assert assumed.plan == make_plan(assumed.case, trial.traits)
    held = {rank: [t.value for t in evidence.parameters] for rank, evidence in trial.ranks.items()}
    for rank, other in enumerate([0, 2, 1, 3]):
        assert all((a.value == b).all() for a, b in zip(assumed.ranks[other].parameters, held[rank], strict=True))
