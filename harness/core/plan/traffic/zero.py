"""Traffic of ZeRO: gradients to the rank whose optimizer has them, parameters from it."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.plan.grid import shard_axis
from harness.core.plan.slices import BYTES
from harness.core.plan.stages import parameters_of_stage, stages_of_rank
from harness.core.plan.traffic.flow import OUTSIDE, Flow
from harness.core.plan.zero import kept_dtype, numel_of_rank, padded_elements, units_held, zero_degree, zero_units


def zero_flows(case: Case, traits: TrainerTraits, rank: int) -> Iterable[Flow]:
    """ZeRO-1 reduces once a step, if the case says no other; ZeRO-2 and 3 keep no whole gradients and reduce after each
    microbatch. ZeRO-1 and 2 gather what the optimizer made of the parameters, at once or in the next forward; ZeRO-3 each
    parameter before forward and before backward."""
    axis, passes, size = shard_axis(case.dims), case.features.accumulation, BYTES[kept_dtype(case)]
    held = [fqn for stage in stages_of_rank(case, rank) for fqn in parameters_of_stage(case, stage)]
    padded = padded_elements(units_held(zero_units(case, traits), held), zero_degree(case))
    whole = sum(numel_of_rank(case, fqn) for fqn in held)  # an all_reduce takes them as they are
    vectors, reduced = padded * size, padded if traits.zero_reduces_by == "reduce_scatter" else whole
    reduced *= BYTES[case.features.reduce_dtype] if case.features.reduce_dtype else size
    times = 1 if case.wrapper == "zero1" and case.features.defer_sync else passes
    yield Flow(axis, "gradients", traits.zero_reduces_by, "backward", times * reduced)
    if case.wrapper == "zero3":
        yield Flow(axis, "parameters", "all_gather", "forward", passes * vectors)
        yield Flow(axis, "parameters", "all_gather", "backward", passes * vectors)
    elif traits.zero_gathers_late:
        yield Flow(axis, "parameters", "all_gather", "forward", vectors, later=True)
        yield Flow(axis, "parameters", "all_gather", OUTSIDE, vectors, last=True)
    else:
        yield Flow(axis, "parameters", "all_gather", OUTSIDE, vectors)
