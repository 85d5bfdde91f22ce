"""What must be true of a case, by arithmetic alone: no torch, no DeviceMesh, nothing that a trainer uses.

The rank grid is arange(world_size) reshaped to the degrees, outermost axis first (pp, dp_replicate, dp_shard, cp, tp).
Groups are its lines; "dp_shard_cp" is dp_shard and cp folded into one, over which FSDP shards if both are there. A
pipeline deals out the layers, so that a rank holds only the parameters of its stages. Tensor parallel cuts a parameter
along one dim, data-parallel sharding then cuts dim 0 of what is left; both cut as torch.chunk does: equal chunks of
ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from harness.plan.grid import groups_by_axis, shard_axis, shard_place
from harness.plan.memory import (
    gradient_spare,
    kept_after_forward,
    padding_after_forward,
    parameter_bytes,
    spare_bytes,
    table_bytes,
)
from harness.plan.observed_units import Observed
from harness.plan.plan import Plan
from harness.plan.slices import FlatUnit, Slice, flat_slices, flat_units, slices_of_rank
from harness.plan.stages import parameters_of_stage, stages_of_rank
from harness.plan.traffic.ranks import flows_of_ranks, integer_bytes, outside_bytes, used_bytes
from harness.plan.units import held_units, units_of_rank
from harness.reference.config import quantized_modules
from harness.spec.case import Case
from harness.spec.traits import USUAL, TrainerTraits


def make_plan(case: Case, traits: TrainerTraits = USUAL, observed: Observed | None = None, *, torch: str = "") -> Plan:
    """traits: what the trainer chose. observed: FSDP's units where case and traits leave them open; without evidence of them,
    "apart". torch: the release that the ranks ran; empty for the oldest supported."""
    dims = case.dims
    flat = flat_units(case) if case.wrapper == "fsdp1" else ()
    shapes = {fqn: (math.prod(shape),) if flat else shape for fqn, shape in case.model.parameter_shapes().items()}
    stages = {rank: stages_of_rank(case, rank) for rank in range(dims.world_size)}
    slices = _slices(case, stages, shapes, flat)
    units = {rank: units_of_rank(case, traits, rank, observed) for rank in slices}
    flows = even_flows = flows_of_ranks(case, traits, case.seq_len(1), units, torch)
    if case.training.variable_length:
        even_flows = flows_of_ranks(case, traits, case.seq_len(2), units, torch)
    return Plan(
        dims=dims,
        first_step=case.steps.start,
        shapes=shapes,
        groups=groups_by_axis(case, units),
        shard_axis=shard_axis(dims),
        stages=stages,
        slices=slices,
        flows=flows,
        even_flows=even_flows,
        outside_bytes={rank: outside_bytes(case, rank, flows[rank]) for rank in slices},
        integer_bytes=integer_bytes(case),
        used_bytes=used_bytes(case),
        parameter_bytes={rank: parameter_bytes(case, rank, slices[rank], flat) for rank in slices},
        units={rank: held_units(case, slices[rank], units[rank]) for rank in slices},
        traits=traits,
        observed=observed,
        table_bytes=table_bytes(case),
        spare_bytes={rank: spare_bytes(case, traits, rank, slices[rank]) for rank in slices},
        gradient_spare={rank: gradient_spare(case, traits, rank) for rank in slices},
        torch=torch,
        quantized=quantized_modules(case.model) if case.training.quantize else (),
        flat=flat,
        after_forward={rank: kept_after_forward(case, rank, slices[rank], units[rank]) for rank in slices},
        padding_after_forward={
            rank: padding_after_forward(case, rank, slices[rank], flat, units[rank]) for rank in slices
        },
    )


def _slices(
    case: Case, stages: Mapping[int, Sequence[int]], shapes: dict[str, tuple[int, ...]], flat: tuple[FlatUnit, ...]
) -> dict[int, dict[str, Slice]]:
    """By rank, what it holds of each parameter of its stages, by fqn."""
    placed = {stage: parameters_of_stage(case, stage) for stage in range(case.n_stages)}
    held = {rank: {fqn: shapes[fqn] for stage in mine for fqn in placed[stage]} for rank, mine in stages.items()}
    if flat:
        return {rank: flat_slices(flat, mine, *shard_place(case.dims, rank)) for rank, mine in held.items()}
    return {rank: slices_of_rank(case.dims, rank, mine) for rank, mine in held.items()}
