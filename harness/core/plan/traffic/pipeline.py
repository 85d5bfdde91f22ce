"""Traffic of pipeline parallelism: activations and their gradients between stages; gradients of a tied embedding."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.plan.grid import shard_degree_and_index, tied_axis, tp_degree_and_index
from harness.core.plan.slices import BYTES, numel, parameter_shapes, slice_of
from harness.core.plan.stages import stages_of_rank
from harness.core.plan.traffic.flow import OUTSIDE, TIED_ROLE, Flow


def pipeline_flows(case: Case, rank: int, length: int) -> Iterable[Flow]:
    """Yield the activations of microbatches that go to the rank of the next stage, and their gradients that come back.

    Nothing without pp. Neighbouring stages on one rank (the tip of a V) send nothing. With sequence parallel each tp
    rank sends its part.
    """
    dims = case.dims
    training = case.training
    stages = stages_of_rank(case, rank)
    next_stages = [stage + 1 for stage in stages]
    borders = [stage for stage in (*stages, *next_stages) if 0 < stage < case.n_stages]
    crossings = sum(borders.count(stage) == 1 for stage in borders)
    degree = dims.cp * (dims.tp if case.features.sequence_parallel else 1)
    size = BYTES[training.compute_dtype or training.dtype]
    moved = crossings * case.passes * case.local_batch * (length // degree) * case.model.dim * size
    if dims.pp > 1:
        yield Flow("pp", "activations and their gradients", "send", "pipeline", moved)
        yield Flow("pp", "activations and their gradients", "recv", "pipeline", moved)


def tied_flows(case: Case, traits: TrainerTraits, rank: int) -> Iterable[Flow]:
    """Yield each rank's slice of the gradient of a tied weight, once a step, on ranks of the first and the last stage.

    Nothing on other ranks, or where `tied_axis` is empty. Over the data ranks it is reduced before: the sums commute.
    """
    axis = tied_axis(case)
    fqn = "tok_embeddings.weight"
    if not axis or not {0, case.n_stages - 1} & {*stages_of_rank(case, rank)}:
        return
    shard = shard_degree_and_index(case.data_dims, rank) if case.shards > 1 else (1, 0)
    held_slice = slice_of(fqn, parameter_shapes(case.model)[fqn], tp_degree_and_index(case.dims, rank), shard)
    size = numel(held_slice) * BYTES[case.training.dtype]
    ops = ("send", "recv") if traits.tied_reduces_by == "send" else ("all_reduce",)
    for op in ops:
        yield Flow(axis, TIED_ROLE, op, OUTSIDE, size)
