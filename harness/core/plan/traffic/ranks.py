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
from harness.core.plan.traffic.tensor_parallel import loss_bytes, scale_flows, tensor_parallel_flows


def flows_of_rank(case: Case, traits: TrainerTraits, rank: int, length: int, units: list[Unit]) -> tuple[Flow, ...]:
    """All that a rank moves in a step of sequences of this length. units: FSDP2's, as they are planned for this rank."""
    pipelined = case.dims.pp > 1
    flows = (
        *(pipelined_data_parallel_flows(case, traits, rank, units) if pipelined else ()),
        *(data_parallel_flows(case, traits, rank, units) if not pipelined else ()),
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
    """Each parameter has a norm on each axis, and each rank eight numbers (losses, counts). The sums over tp of a loss that is
    computed outside of forward count, too, and those of a batch that is evaluated. So do the optional flows, and what Muon's
    owners of matrices get and send."""
    dims, training = case.dims, case.training
    axes = sum(getattr(dims, axis) > 1 for axis in AXES)
    numbers = len(parameter_shapes(case.model)) * axes + 8 * dims.world_size
    last = case.n_stages - 1 in stages_of_rank(case, rank)
    apart = dims.tp > 1 and case.features.loss_parallel and last and not traits.loss_in_forward
    losses = loss_bytes(case, training.seq_len) * (1 + bool(case.features.validate_every)) if apart else 0
    besides = sum(flow.bytes for flow in flows if flow.optional)
    return numbers * BYTES["float64"] + losses + besides + owners_bytes(case, traits, rank)


def integer_bytes(case: Case) -> int:
    """DDP compares the number and the shapes of all parameters, and later sends out in which bucket each of them is. ZeRO-3's
    ranks compare in which order modules ran and parameters were needed: some of either for each parameter."""
    if case.wrapper == "zero3":
        return 16 * len(parameter_shapes(case.model)) * 8
    if case.wrapper not in ("ddp", "replicate"):
        return 0
    return (4 * len(parameter_shapes(case.model)) + 2 * case.dims.world_size + 8) * 8  # int64


def used_bytes(case: Case) -> int:
    """With find_unused_parameters DDP's ranks tell each other which parameters they used, whenever they reduce: an int32 each,
    and one number. In a static graph they do so in the first step only."""
    if case.wrapper not in ("ddp", "replicate"):
        return 0
    return (4 * len(parameter_shapes(case.model)) + 8) * case.passes
