"""A tied embedding in a pipeline: the plan of its two copies, by literals worked out by hand.

The tiny model's embedding has 8x4 = 32 elements, 256 bytes. Its layers are of no matter here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from literal import ADAMW, TINY, tiny_case

from harness.core.case.dims import ParallelDims
from harness.core.case.traits import TrainerTraits
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan
from harness.core.plan.traffic.flow import TIED_ROLE

EMBEDDING = "tok_embeddings.weight"
FOUR_LAYERS = replace(TINY, n_layers=4, tied_embeddings=True)


def plan_of(dims: ParallelDims, traits: TrainerTraits | None = None, **changes: Any) -> Plan:
    return make_plan(tiny_case(dims, **{"model": FOUR_LAYERS, **changes}), traits or TrainerTraits())


def sums(plan: Plan) -> dict[int, list[tuple[str, str, str, int]]]:
    """Return, by rank, what moves for the tied weight."""
    of = {r: [(f.axis, f.op, f.phase, f.bytes) for f in plan.flows[r] if f.role == TIED_ROLE] for r in plan.flows}
    return {rank: flows for rank, flows in of.items() if flows}


def test_first_and_last_stage_have_it_and_no_other() -> None:
    plan = plan_of(ParallelDims(pp=4), microbatches=4)
    assert [rank for rank, held in plan.slices.items() if EMBEDDING in held] == [0, 3]
    assert plan.parameter_bytes[0][0] - plan.parameter_bytes[1][0] == 256


def test_two_ranks_of_four_add_up_their_gradients_and_are_a_group() -> None:
    plan = plan_of(ParallelDims(pp=4), microbatches=4)
    assert plan.groups["pp_ends"] == ((0, 3),)
    assert sums(plan) == dict.fromkeys((0, 3), [("pp_ends", "all_reduce", "outside", 256)])
    assert plan.peers(1, "pp_ends") == (1,)


def test_two_stages_need_no_other_group_than_the_pipelines() -> None:
    plan = plan_of(ParallelDims(pp=2), accumulation=2, microbatches=2)
    assert [*plan.groups] == ["pp"]
    assert sums(plan) == dict.fromkeys((0, 1), [("pp", "all_reduce", "outside", 256)])


@pytest.mark.parametrize("dims", [ParallelDims(pp=2, dp_shard=2), ParallelDims(pp=2, tp=2)])
def test_each_rank_adds_up_its_slice(dims: ParallelDims) -> None:
    assert sums(plan_of(dims, microbatches=2)) == dict.fromkeys(range(4), [("pp", "all_reduce", "outside", 128)])


def test_replicas_each_add_up_all_of_it() -> None:
    plan = plan_of(ParallelDims(pp=2, dp_replicate=2), microbatches=2)
    assert sums(plan) == dict.fromkeys(range(4), [("pp", "all_reduce", "outside", 256)])


def test_a_rank_with_both_ends_of_a_v_has_one_weight_and_adds_nothing() -> None:
    plan = plan_of(ParallelDims(pp=2), schedule="ZBVZeroBubble", microbatches=4)
    assert [rank for rank, held in plan.slices.items() if EMBEDDING in held] == [0]
    assert sums(plan) == {}


def test_what_is_frozen_has_no_gradient_to_add() -> None:
    frozen = replace(ADAMW, trainable=("layers.*", "norm.*"))
    assert sums(make_plan(tiny_case(ParallelDims(pp=2), frozen, model=FOUR_LAYERS, microbatches=2))) == {}


def test_a_trainer_may_send_it_both_ways() -> None:
    plan = plan_of(ParallelDims(pp=4), TrainerTraits(tied_reduces_by="send"), microbatches=4)
    assert sums(plan)[3] == [("pp_ends", "send", "outside", 256), ("pp_ends", "recv", "outside", 256)]


def test_it_is_a_unit_of_its_own_which_the_last_stage_gathers_too() -> None:
    plan = plan_of(ParallelDims(pp=2, dp_shard=2), TrainerTraits(fsdp_units="apart"), microbatches=2)
    assert [{(EMBEDDING,), ("norm.weight",)} & {*plan.units[rank]} for rank in (0, 2)] == [
        {(EMBEDDING,)},
        {(EMBEDDING,), ("norm.weight",)},
    ]
