"""All flows of a rank, put together from the kinds of parallelism."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.case.measured import Unit
from harness.core.case.traits import TrainerTraits
from harness.core.plan.slices import BYTES, parameter_shapes
from harness.core.plan.stages import stages_of_rank
from harness.core.plan.traffic.context_parallel import context_parallel_flows
from harness.core.plan.traffic.data_parallel import data_parallel_flows, pipelined_data_parallel_flows
from harness.core.plan.traffic.flow import Flow
from harness.core.plan.traffic.muon import muon_flows, owners_bytes
from harness.core.plan.traffic.pipeline import pipeline_flows, tied_flows
from harness.core.plan.traffic.recomputation import recomputed_flows
from harness.core.plan.traffic.tensor_parallel import loss_parallel_bytes, scale_flows, tensor_parallel_flows


def flows_of_rank(case: Case, traits: TrainerTraits, rank: int, length: int, units: list[Unit]) -> tuple[Flow, ...]:
    """Return all flows of a rank in a step; those of 0 bytes are left out.

    length: tokens of a sample in that step. units: FSDP2's, as they are planned for this rank.
    """
    data_flows = pipelined_data_parallel_flows if case.dims.pp > 1 else data_parallel_flows
    flows = (
        *data_flows(case, traits, rank, units),
        *tensor_parallel_flows(case, traits, stages_of_rank(case, rank), length),
        *scale_flows(case, rank, length),
        *context_parallel_flows(case, traits, rank, length),
        *recomputed_flows(case, traits, rank, length),
        *pipeline_flows(case, rank, length),
        *tied_flows(case, traits, rank),
        *muon_flows(case, traits, rank),
    )
    return tuple(flow for flow in flows if flow.bytes)


def outside_bytes(case: Case, traits: TrainerTraits, rank: int, flows: Iterable[Flow]) -> int:
    """Return the most bytes that a rank moves in a step outside of forward and backward, in addition to planned flows.

    Each parameter has a norm on each axis, and each rank eight numbers (losses, counts). The sums over tp of a loss that is
    computed outside of forward count, too, and those of a batch that is evaluated. So do the optional flows, and what Muon's
    owners of matrices get and send.
    """
    dims = case.dims
    axes = sum(getattr(dims, axis) > 1 for axis in AXES)
    numbers = len(parameter_shapes(case.model)) * axes + 8 * dims.world_size
    has_last_stage = case.n_stages - 1 in stages_of_rank(case, rank)
    losses = 0
    if dims.tp > 1 and case.features.loss_parallel and has_last_stage and not traits.loss_in_forward:
        batches = 1 + bool(case.features.validate_every)
        losses = loss_parallel_bytes(case, case.training.seq_len) * batches
    optional = sum(flow.bytes for flow in flows if flow.optional)
    return numbers * BYTES["float64"] + losses + optional + owners_bytes(case, traits, rank)


def integer_bytes(case: Case) -> int:
    """Return the most bytes of integers that a rank moves in the first two steps, inside forward and backward. 0 but
    for DDP, ZeRO-3.

    DDP compares the number and the shapes of all parameters, and later sends out in which bucket each of them is.
    ZeRO-3's ranks compare in which order modules ran and parameters were needed: some of either for each parameter.
    """
    if case.wrapper == "zero3":
        return 16 * len(parameter_shapes(case.model)) * 8
    if case.wrapper not in ("ddp", "replicate"):
        return 0
    return (4 * len(parameter_shapes(case.model)) + 2 * case.dims.world_size + 8) * 8  # int64


def unused_parameter_bytes(case: Case) -> int:
    """Return the most bytes of integers that a rank moves in a later step under DDP or replicate; 0 for other wrappers.

    With find_unused_parameters DDP's ranks exchange which parameters they used, whenever they reduce: an int32 each,
    and one number. In a static graph they do so in the first step only. The bound is the same without that option.
    """
    if case.wrapper not in ("ddp", "replicate"):
        return 0
    return (4 * len(parameter_shapes(case.model)) + 8) * case.passes
