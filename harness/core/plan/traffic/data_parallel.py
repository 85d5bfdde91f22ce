"""Traffic of data parallelism: gradients of DDP and replicate; gathers and reduce-scatters of FSDP."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable

from harness.core.case import schedule
from harness.core.case.case import Case
from harness.core.case.features import LOOPED, ZERO
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.frozen import units_gathered_in_backward
from harness.core.plan.grid import coordinate_of_rank, gather_axis, shard_axis
from harness.core.plan.slices import BYTES, flat_units, padded_numel, padded_numels, parameter_shapes
from harness.core.plan.stages import actions_of_rank, parameters_of_rank, parameters_of_stage, stages_of_rank
from harness.core.plan.traffic.flow import OUTSIDE, Flow
from harness.core.plan.units import output_weight, unit_called_in_chunks, unit_of_output_alone
from harness.core.plan.zero import (
    kept_parameter_dtype,
    numel_of_rank,
    padded_elements,
    vectors_of_parameters,
    zero_degree,
    zero_units,
)
from harness.reference.config import is_trainable

# ---- Traffic of ZeRO: gradients to the rank whose optimizer has them, parameters from it


def zero_flows(case: Case, traits: TrainerTraits, rank: int) -> Iterable[Flow]:
    """Yield the traffic of ZeRO: gradients to the rank whose optimizer has them, parameters from it.

    ZeRO-1 reduces once a step unless the case turns off `defer_sync`; ZeRO-2 and 3 keep no whole gradients and reduce
    after each microbatch. ZeRO-1 and 2 gather what the optimizer made of the parameters, at once or in the next
    forward; ZeRO-3 each parameter before forward and before backward.
    """
    axis = shard_axis(case.dims)
    passes = case.features.accumulation
    size = BYTES[kept_parameter_dtype(case)]
    fqns = parameters_of_rank(case, rank)
    padded = padded_elements(vectors_of_parameters(zero_units(case, traits), fqns), zero_degree(case))
    unpadded = sum(numel_of_rank(case, fqn) for fqn in fqns)  # an all_reduce takes them as they are
    gathered_bytes = padded * size
    reduced = padded if traits.zero_reduces_by == "reduce_scatter" else unpadded
    reduced *= BYTES[case.features.reduce_dtype] if case.features.reduce_dtype else size
    times = 1 if case.wrapper == "zero1" and case.features.defers_every_reduction else passes
    yield Flow(axis, "gradients", traits.zero_reduces_by, "backward", times * reduced)
    if case.wrapper == "zero3":
        yield Flow(axis, "parameters", "all_gather", "forward", passes * gathered_bytes)
        yield Flow(axis, "parameters", "all_gather", "backward", passes * gathered_bytes)
    elif traits.zero_gathers_late:
        yield Flow(axis, "parameters", "all_gather", "forward", gathered_bytes, later=True)
        yield Flow(axis, "parameters", "all_gather", OUTSIDE, gathered_bytes, last=True)
    else:
        yield Flow(axis, "parameters", "all_gather", OUTSIDE, gathered_bytes)


# ---- all that data parallelism moves


def data_parallel_flows(case: Case, traits: TrainerTraits, rank: int, units: list[Unit]) -> Iterable[Flow]:
    """Yield a rank's traffic of a step over the data-parallel axes, without a pipeline: parameters gathered, gradients
    reduced.

    Nothing where there are neither shards nor replicas. units: the rank's FSDP2 units.
    """
    if case.wrapper == "fsdp1":
        yield from _fsdp1_flows(case, traits)
        return
    if case.wrapper in ZERO:
        yield from zero_flows(case, traits, rank)
        return
    dims = case.data_dims
    features = case.features
    tp_index = coordinate_of_rank(case.dims, rank)["tp"]
    stored = case.training.dtype
    gathered = BYTES[case.training.compute_dtype or stored]
    reduced = BYTES[features.reduce_dtype or case.training.compute_dtype or stored]
    scattered = reduced * reductions_per_step(case)
    over_replicas = reduced if features.defers_replica_reduction else scattered
    shards = dims.shards
    axis = shard_axis(dims)
    fqns = [*parameter_shapes(case.model)]
    if shards > 1:
        fqns = [*itertools.chain.from_iterable(unit.parameters for unit in units)]
    everything = _padded_elements(case, traits, fqns, tp_index)
    differentiated = _padded_elements(case, traits, [fqn for fqn in fqns if is_trainable(case.training, fqn)], tp_index)
    alone = unit_of_output_alone(units) if traits.loss_chunks > 1 else None
    called_twice = unit_called_in_chunks(case, traits, units)
    in_chunks = alone or called_twice
    waited = 0
    if in_chunks and case.features.accumulation > 1 and case.features.defers_every_reduction:
        # Gradients of earlier microbatches wait in the unit; the first backward that comes to it, a chunk's, reduces them.
        waited = _padded_elements(case, traits, in_chunks.parameters, tp_index)
        if alone and traits.holds_output:  # the output waits for its last chunk, all others are reduced at its first
            waited = everything - waited
    if shards > 1:
        times = features.accumulation * gathered
        freed = _units_gathered_again(case, units, alone if traits.holds_output else None)
        first = gathered if traits.keeps_over_accumulation and case.wrapper == "fsdp2" else times
        yield Flow(axis, "parameters", "all_gather", "forward", first * everything)
        fqns_by_degree: dict[int, list[str]] = defaultdict(list)
        for unit in freed:
            fqns_by_degree[unit.degree] += unit.parameters
        for degree in sorted(fqns_by_degree):
            again_bytes = times * _padded_elements(case, traits, fqns_by_degree[degree], tp_index)
            yield Flow(gather_axis(case, degree), "parameters", "all_gather", "backward", again_bytes)
        yield Flow(axis, "gradients", "reduce_scatter", "backward", differentiated * scattered + waited * reduced)
        if in_chunks and not (alone and traits.holds_output):
            later_calls = traits.loss_chunks - 1 if alone else 1
            yield from _chunk_flows(case, traits, axis, in_chunks, tp_index, times=later_calls)
        elif traits.chunks_behind_forward and not alone:
            yield from _loss_unit_flows(case, traits, axis, units[-1], tp_index)
    if dims.replicas > 1:
        replicated = differentiated * over_replicas + waited * reduced
        yield Flow(case.replicate_axis, "gradients", "all_reduce", "backward", replicated // shards)
    if case.wrapper == "replicate":  # it begins in its first forward what DDP does when it is made
        weights = everything * BYTES[stored]
        yield Flow(case.replicate_axis, "weights", "broadcast", "forward", weights, first=True)


def _units_gathered_again(case: Case, units: list[Unit], held_whole: Unit | None) -> list[Unit]:
    """Return the units that backward gathers: those freed after forward, which backward reaches and gathers by itself.

    held_whole: a unit that stays gathered for the loss, and is left out; None for none.
    """
    reached = units_gathered_in_backward(case, units)
    return [unit for unit in reached if unit.degree > 1 and unit.backward_gathers and unit is not held_whole]


def _padded_elements(case: Case, traits: TrainerTraits, fqns: Iterable[str], tp_index: int) -> int:
    """Return the number of elements that FSDP2 moves for these parameters, padding included."""
    numels = padded_numels(case, traits, tp_index)
    return sum(numels[fqn] for fqn in fqns)


def _loss_unit_flows(case: Case, traits: TrainerTraits, axis: str, last: Unit, tp_index: int) -> Iterable[Flow]:
    """Yield what the unit of final norm and output gathers for a loss in chunks, when the model's forward is over.

    A unit that its policy frees is free by then, and is gathered once more for the loss. The loss leaves the unit with that
    policy, so a unit that its policy keeps is kept in the first pass only.
    """
    size = BYTES[case.training.compute_dtype or case.training.dtype]
    once = _padded_elements(case, traits, last.parameters, tp_index) * size
    yield Flow(axis, "parameters", "all_gather", "forward", (case.features.accumulation - 1) * once)
    yield Flow(axis, "parameters", "all_gather", "forward", once, later=case.features.reshard_after_forward != "always")


def _chunk_flows(
    case: Case, traits: TrainerTraits, axis: str, output: Unit, tp_index: int, *, times: int
) -> Iterable[Flow]:
    """Yield what the output's unit gathers for chunks after the first. FSDP2 frees a unit behind each backward of its
    module, and by its policy behind each forward.

    times: how often a pass does so; an output that is its own unit does it for every chunk after the first.
    """
    size = BYTES[case.training.compute_dtype or case.training.dtype]
    once = _padded_elements(case, traits, output.parameters, tp_index) * size
    others = times * case.features.accumulation * once
    if output.degree > 1:
        yield Flow(gather_axis(case, output.degree), "parameters", "all_gather", "forward", others)
    yield Flow(axis, "parameters", "all_gather", "backward", others)


def _stage_chunk_flows(case: Case, traits: TrainerTraits, rank: int, units: list[Unit]) -> Iterable[Flow]:
    """Yield what the output's unit gathers in forward for each chunk of the loss after a microbatch's first, on the
    last stage.

    Nothing if the output shares a unit or stays whole. A pipeline's backward frees nothing before the pass is over.
    """
    output = unit_of_output_alone(units)
    last = case.n_stages - 1
    if output is None or output.degree == 1 or last not in stages_of_rank(case, rank):
        return
    size = BYTES[case.training.compute_dtype or case.training.dtype] * case.features.accumulation
    once = padded_numel(case, traits, output_weight(case), coordinate_of_rank(case.data_dims, rank)["tp"]) * size
    others = (traits.loss_chunks - 1) * case.microbatches * once
    yield Flow(gather_axis(case, output.degree), "parameters", "all_gather", "forward", others)


def reductions_per_step(case: Case) -> int:
    """Return how often gradients are reduce-scattered, or all-reduced by DDP, over the data ranks in a step: 1 if deferred.

    HSDP's all-reduce over replicas may run less often.
    """
    return 1 if case.features.defers_every_reduction else case.features.accumulation


def _fsdp1_flows(case: Case, traits: TrainerTraits) -> Iterable[Flow]:
    """Yield the traffic of FSDP1: whole flat vectors, padded to equal parts. It is the same for all ranks.

    A unit that is kept after forward is kept after backward too, until one reduces gradients; but not the root's, whose
    strategy is to free it.
    """
    degree = case.dims.dp_shard
    passes = case.features.accumulation
    computed = case.training.compute_dtype
    size = BYTES[computed or case.training.dtype]
    reduced_size = BYTES[case.features.reduce_dtype or computed or case.training.dtype]
    kept = case.features.reshard_after_forward == "never"
    moved = [unit.elements_per_rank(degree) * degree * size for unit in flat_units(case, traits.vector_order)]
    reduced = reductions_per_step(case) * sum(moved) // size * reduced_size
    if degree > 1:
        times = reductions_per_step(case) if kept else passes
        yield Flow("dp_shard", "parameters", "all_gather", "forward", times * sum(moved))
        yield Flow("dp_shard", "parameters", "all_gather", "backward", 0 if kept else passes * sum(moved[1:]))
        yield Flow("dp_shard", "gradients", "reduce_scatter", "backward", reduced)
    if case.dims.dp_replicate > 1:
        yield Flow("dp_replicate", "gradients", "all_reduce", "backward", reduced // degree)


def pipelined_data_parallel_flows(case: Case, traits: TrainerTraits, rank: int, units: list[Unit]) -> Iterable[Flow]:
    """Yield the traffic of a step over the data-parallel axes, in a pipeline.

    torch gathers a stage when its schedule needs it, and reduces once a pass, after its last backward. DDP's hooks reduce in
    the last microbatch's backward of each pass. ZeRO-1 does as without a pipeline.
    """
    if case.wrapper in ZERO:
        yield from zero_flows(case, traits, rank)
        return
    dims = case.data_dims
    features = case.features
    stored = case.training.dtype
    tp_index = coordinate_of_rank(dims, rank)["tp"]
    trained_fqns = [fqn for fqn in parameters_of_rank(case, rank) if is_trainable(case.training, fqn)]
    differentiated = _padded_elements(case, traits, trained_fqns, tp_index)
    gathered = features.accumulation * BYTES[case.training.compute_dtype or stored]
    reduced = features.accumulation * BYTES[features.reduce_dtype or case.training.compute_dtype or stored]
    shards = dims.shards
    axis = shard_axis(dims)
    if shards > 1:
        yield from _stage_flows(case, traits, rank, units, gathered)
        yield from _stage_chunk_flows(case, traits, rank, units)
        yield Flow(axis, "gradients", "reduce_scatter", "pipeline", differentiated * reduced)
    if dims.replicas > 1:
        phase = "backward" if case.wrapper == "ddp" else "pipeline"
        yield Flow(case.replicate_axis, "gradients", "all_reduce", phase, differentiated // shards * reduced)


def _stage_flows(case: Case, traits: TrainerTraits, rank: int, units: list[Unit], element_bytes: int) -> Iterable[Flow]:
    """Yield what a pipeline's schedule gathers of a rank's stages: parameters of units that are kept, then of freed ones.

    element_bytes: bytes of an element, times the accumulation.
    """
    dims = case.data_dims
    tp_index = coordinate_of_rank(dims, rank)["tp"]
    order = actions_of_rank(case, rank)
    looped = case.features.schedule in LOOPED
    freed_fqns = set[str]()
    for unit in units:
        if unit.degree == dims.shards:
            freed_fqns.update(unit.parameters)
    for freed in (False, True):
        for (stage, phase), count in schedule.count_gathers(order, looped=looped, freed=freed).items():
            fqns = [fqn for fqn in parameters_of_stage(case, stage) if (fqn in freed_fqns) == freed]
            elements = _padded_elements(case, traits, fqns, tp_index)
            yield Flow(shard_axis(dims), "parameters", "all_gather", phase, count * elements * element_bytes)
