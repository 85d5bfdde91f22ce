"""Making the plan of a case, by arithmetic alone: no torch, no DeviceMesh, nothing that a trainer uses.

The rank grid is arange(world_size) reshaped to the degrees, outermost axis first (pp, dp_replicate, dp_shard, cp, tp).
Groups are its lines. "dp_shard_cp" is dp_shard and cp folded into one, over which FSDP shards if both are there.
"dp_replicate_cp" is folded likewise, and DDP reduces over it. "pp_ends" is the first and the last rank of a pipeline,
which share a tied embedding. A pipeline deals out the layers, so that a rank holds only its stages' parameters. Tensor
parallel cuts a parameter along one dim, data-parallel sharding then cuts dim 0 of what is left. Both cut as torch.chunk
does: equal chunks of ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

from harness.core.case.case import Case
from harness.core.case.features import ZERO
from harness.core.case.measured import Observed, Unit
from harness.core.case.traits import USUAL_TRAITS, TrainerTraits
from harness.core.plan.frozen import has_frozen, trained_values
from harness.core.plan.grid import groups_by_axis, shard_axis, shard_degree_and_index, tp_degree_and_index
from harness.core.plan.kinds import PerRank, Shapes, kinds_of_ranks, places_of_ranks, rank_kind_numbers
from harness.core.plan.memory import (
    gradient_spare_bytes,
    kept_after_forward,
    padding_after_forward,
    parameter_bytes,
    spare_bytes,
    state_bytes,
    table_bytes,
)
from harness.core.plan.plan import Plan
from harness.core.plan.slices import FlatUnit, Slice, flat_slices, flat_units, slices_of_rank
from harness.core.plan.stages import parameters_of_stage, stages_of_rank
from harness.core.plan.traffic.flow import Flow
from harness.core.plan.traffic.ranks import flows_of_rank, integer_bytes, outside_bytes, unused_parameter_bytes
from harness.core.plan.units import parameters_of_units, units_of_rank
from harness.core.plan.zero import zero_units
from harness.reference.config import quantized_modules

T = TypeVar("T")


def make_plan(case: Case, traits: TrainerTraits = USUAL_TRAITS) -> Plan:
    """Return the plan of one launch, its values by rank computed when they are first read.

    FSDP's units are those that case or traits name, else those that were measured, else assumed ones.
    """
    flat, shapes = _vectors_and_shapes(case, traits)
    units = PerRank(_kinds_by_claims(case, traits.measured.units), lambda rank: units_of_rank(case, traits, rank))
    stages, slices, kinds = _stages_slices_kinds(case, traits, shapes, flat, units)

    def each(make: Callable[[int], T]) -> PerRank[T]:
        return PerRank(kinds, make)

    moved = partial(_flows_of_step, case, traits, units, kinds)
    flows = moved(1)
    plan = Plan(
        dims=case.dims,
        is_exact=case.is_complete,
        steps=case.steps,
        shapes=shapes,
        groups=groups_by_axis(case, units.values_by_kind()),
        shard_axis=shard_axis(case.data_dims),
        replicate_axis=case.replicate_axis,
        stages=stages,
        slices=slices,
        flows=flows,
        even_flows=moved(2) if case.training.variable_length else flows,
        last_flows=moved(case.steps[-1]),
        outside_bytes=each(lambda rank: outside_bytes(case, traits, rank, flows[rank])),
        integer_bytes=integer_bytes(case),
        used_bytes=unused_parameter_bytes(case),
        parameter_bytes=each(lambda rank: parameter_bytes(case, traits, rank, slices[rank], flat)),
        units=each(lambda rank: parameters_of_units(case, slices[rank], units[rank])),
        traits=traits,
        table_bytes=table_bytes(case),
        spare_bytes=each(lambda rank: spare_bytes(case, traits, rank, slices[rank], flat)),
        gradient_spare=each(lambda rank: gradient_spare_bytes(case, traits, rank)),
        quantized=quantized_modules(case.model) if case.training.quantize else (),
        flat=flat,
        after_forward=each(lambda rank: kept_after_forward(case, traits, rank, slices[rank], units[rank])),
        padding_after_forward=each(
            lambda rank: padding_after_forward(case, traits, rank, slices[rank], flat, units[rank])
        ),
    )
    return _with_zero(case, _with_frozen(case, plan))


def _flows_of_step(
    case: Case, traits: TrainerTraits, units: PerRank[list[Unit]], kinds: Mapping[int, int], step: int
) -> PerRank[tuple[Flow, ...]]:
    """Return the traffic of one step, by rank. kinds: the kind of each rank; ranks of a kind share one value."""
    case_at_step = case.with_batch_of_step(step)
    return PerRank(kinds, lambda rank: flows_of_rank(case_at_step, traits, rank, case.seq_len(step), units[rank]))


def _stages_slices_kinds(
    case: Case, traits: TrainerTraits, shapes: Shapes, flat: tuple[FlatUnit, ...], units: PerRank[list[Unit]]
) -> tuple[PerRank[tuple[int, ...]], PerRank[dict[str, Slice]], dict[int, int]]:
    """Return the stages that each rank runs, the slices that it holds, and the number of its kind, all by rank.

    Where FSDP1 or ZeRO cut flat vectors, each place in the mesh is a kind of its own.
    """
    places = places_of_ranks(case.data_dims)
    pp_indices = {rank: rank_place.pp for rank, rank_place in places.items()}
    stages = PerRank(pp_indices, lambda rank: stages_of_rank(case, rank))
    shapes_of_ranks = PerRank(stages.kinds, lambda rank: _shapes_of_stages(case, stages[rank], shapes))
    slices = PerRank(places, lambda rank: _slices_of_rank(case, traits, rank, shapes_of_ranks[rank], flat))
    if flat:
        kinds = rank_kind_numbers({rank: (rank_place, units.kinds[rank]) for rank, rank_place in places.items()})
    else:
        kinds = kinds_of_ranks(case.data_dims, places, shapes_of_ranks, units, traits)
    return stages, slices, kinds


def _vectors_and_shapes(case: Case, traits: TrainerTraits) -> tuple[tuple[FlatUnit, ...], dict[str, tuple[int, ...]]]:
    """Return the flat vectors that FSDP1 or ZeRO cut in place of parameters, () with other wrappers, and each
    parameter's shape.

    A parameter that is part of a vector has one dim.
    """
    flat: tuple[FlatUnit, ...] = flat_units(case, traits.vector_order) if case.wrapper == "fsdp1" else ()
    flat = zero_units(case, traits) if case.wrapper in ZERO else flat
    shapes = case.model.parameter_shapes()
    if flat:
        return flat, {fqn: (math.prod(shape),) for fqn, shape in shapes.items()}
    return flat, {**shapes}


def _with_frozen(case: Case, plan: Plan) -> Plan:
    """Return the plan with the bytes of gradients and optimizer state of trained parameters alone; unchanged if all are
    trained."""
    if not has_frozen(case):
        return plan

    def trained_bytes(rank: int) -> tuple[int, int]:
        return parameter_bytes(case, plan.traits, rank, trained_values(case, plan.slices[rank]), plan.flat)

    ranks = {rank: rank for rank in range(case.dims.world_size)}
    return replace(plan, gradient_bytes=PerRank(ranks, trained_bytes), state_bytes=PerRank(ranks, trained_bytes))


def _with_zero(case: Case, plan: Plan) -> Plan:
    """Return the plan with the slices and bytes of gradients and optimizer state that ZeRO leaves a rank; unchanged
    without ZeRO.

    ZeRO-1 may keep the whole gradients that it reduces, so that their bytes stay those of parameters.
    """
    if case.wrapper not in ZERO:
        return plan
    ranks = {rank: rank for rank in range(case.dims.world_size)}
    shapes = PerRank(ranks, lambda rank: {fqn: plan.shapes[fqn] for fqn in plan.slices[rank]})
    cut = PerRank(
        ranks,
        lambda rank: flat_slices(
            plan.flat, shapes[rank], *shard_degree_and_index(case.dims, rank), tp_degree_and_index(case.dims, rank)
        ),
    )
    kept = PerRank(ranks, lambda rank: state_bytes(case, cut[rank], plan.flat))
    gradients = {} if case.wrapper == "zero1" else kept
    return replace(plan, gradient_slices=cut, state_slices=cut, gradient_bytes=gradients, state_bytes=kept)


def _kinds_by_claims(case: Case, observed: Observed | None) -> dict[int, int]:
    """Return kinds of ranks by what their wrappers claim: those that claim the same have the same units."""
    claimed_units = observed or {}
    return rank_kind_numbers({rank: tuple(claimed_units.get(rank, ())) for rank in range(case.dims.world_size)})


def _shapes_of_stages(case: Case, stages: Sequence[int], shapes: Shapes) -> Shapes:
    """Return the shapes of the parameters of these stages, by fqn."""
    shapes_of_stages = {}
    for stage in stages:
        for fqn in parameters_of_stage(case, stage):
            shapes_of_stages[fqn] = shapes[fqn]
    return shapes_of_stages


def _slices_of_rank(
    case: Case, traits: TrainerTraits, rank: int, shapes: Shapes, flat: tuple[FlatUnit, ...]
) -> dict[str, Slice]:
    """Return the slice that a rank holds of each parameter of its stages, by fqn. shapes: those of these parameters."""
    shard = shard_degree_and_index(case.data_dims, rank) if case.shards > 1 else (1, 0)
    if flat:
        return flat_slices(flat, shapes, *shard, tp_degree_and_index(case.dims, rank))
    return slices_of_rank(case.data_dims, rank, shapes, traits)
