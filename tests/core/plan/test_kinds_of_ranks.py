"""Ranks of a kind share one answer: it must be the one that each of them has alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import pytest
from literal import UNEVEN, tiny_case
from test_plans import CASES, EIGHT, FIVE, FOUR

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan import make_plan as module
from harness.core.plan.kinds import PerRank, places_of_ranks
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan
from harness.reference.config import PRESETS, TrainingConfig

MANY = {
    "hsdp, uneven": tiny_case(ParallelDims(dp_replicate=2, dp_shard=3), EIGHT, model=UNEVEN),
    "cp and tp, over four and two ranks": tiny_case(
        ParallelDims(dp_shard=2, cp=2, tp=2), EIGHT, model=FIVE, reshard_after_forward=2
    ),
    "a pipeline of five layers, uneven": tiny_case(
        ParallelDims(pp=2, dp_shard=3, tp=2), replace(EIGHT, global_batch=24), model=FIVE
    ),
    "fsdp1": tiny_case(ParallelDims(dp_replicate=2, dp_shard=3), EIGHT, model=FOUR, wrapper="fsdp1"),
}


def fields_of(plan: Plan) -> dict[str, Any]:
    values = {field.name: getattr(plan, field.name) for field in fields(plan)}
    return {name: dict(value) if isinstance(value, Mapping) else value for name, value in values.items()}


def each_alone(monkeypatch: pytest.MonkeyPatch, case: Case, **how: Any) -> dict[str, Any]:
    with monkeypatch.context() as patch:
        patch.setattr(module, "PerRank", lambda kinds, make: PerRank({rank: rank for rank in kinds}, make))
        return fields_of(make_plan(case, **how))


@pytest.mark.parametrize("name", [*MANY, *CASES])
def test_ranks_of_a_kind_have_the_plan_that_each_has_alone(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = MANY[name] if name in MANY else of_plans(name)
    assert fields_of(make_plan(case)) == each_alone(monkeypatch, case)


def of_plans(name: str) -> Case:
    layout, training, *changes = CASES[name]
    return tiny_case(layout, training, **(changes[0] if changes else {}))


def test_ranks_whose_wrappers_claim_other_units_are_of_other_kinds(monkeypatch: pytest.MonkeyPatch) -> None:
    case, names = tiny_case("hsdp_2x2"), tuple(tiny_case("hsdp_2x2").model.parameter_shapes())
    together, apart = (Unit(names, 2),), (Unit(names[:3], 2), Unit(names[3:], 1))
    traits = TrainerTraits().with_units({0: together, 1: apart, 2: together, 3: ()})
    plan = make_plan(case, traits)
    assert fields_of(plan) == each_alone(monkeypatch, case, traits=traits)
    assert plan.units[0] == plan.units[2] == (names,) and plan.units[1] == (names[:3], names[3:])


def test_a_loss_in_chunks_leaves_the_last_unit_on_all_ranks_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    case = tiny_case(ParallelDims(pp=2, dp_shard=2, tp=2), replace(EIGHT, global_batch=16), model=FIVE)
    traits = TrainerTraits(fsdp_units="apart", loss_chunks=2, keeps_loss_unit=True)
    assert fields_of(make_plan(case, traits)) == each_alone(monkeypatch, case, traits=traits)


def test_16384_ranks_of_405b_are_of_18_kinds() -> None:
    """16 stages; and of the first and the last the last shard, which has fewer rows of the vocabulary: 30 for 126."""
    dims = ParallelDims(pp=16, dp_shard=128, tp=8)
    recipe = TrainingConfig(dtype="float32", compute_dtype="bfloat16", global_batch=2048, seq_len=8192)
    plan = make_plan(Case("large", "-", dims, PRESETS["405B"], recipe, Features(microbatches=16)))
    assert isinstance(plan.flows, PerRank)
    assert plan.flows.first_ranks() == [0, 1016, *range(1024, 16384, 1024), 16376]
    assert plan.slices[1016]["tok_embeddings.weight"] == ((16002, 16032), (0, 16384))
    assert plan.slices[1015]["tok_embeddings.weight"][0] == (7 * 16032 + 126 * 126, 7 * 16032 + 127 * 126)
    assert [plan.parameter_bytes[rank][0] for rank in (0, 1016)] == [107_880_448, 101_588_992]


def test_places_fold_cp_into_the_shards_and_leave_out_replicas() -> None:
    places = places_of_ranks(ParallelDims(pp=2, dp_replicate=2, dp_shard=2, cp=2, tp=2))
    assert places[5] == (0, 2, 1)
    assert places[5] == places[13] and places[31] == (1, 3, 1)


def test_a_rank_that_is_not_there_has_no_plan() -> None:
    with pytest.raises(KeyError):
        make_plan(tiny_case("fsdp_2")).slices[2]


def test_what_a_kind_has_is_made_once_and_when_it_is_looked_at() -> None:
    asked = []
    mapping = PerRank({0: "a", 1: "b", 2: "a"}, lambda rank: asked.append(rank) or rank * 10)
    assert asked == [] and (mapping[2], mapping[0], len(mapping), mapping.first_ranks()) == (20, 20, 3, [0, 1])
    assert (dict(mapping), list(mapping.values_by_kind()), asked) == ({0: 20, 1: 10, 2: 20}, [20, 10], [2, 1])
