"""Traffic of context parallelism: the K/V exchange over cp, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from harness.plan.slices import BYTES
from harness.plan.stages import layers_of_stage, stages_of_rank
from harness.plan.traffic.flow import Flow
from harness.spec.case import Case
from harness.spec.traits import TrainerTraits


def context_parallel_flows(case: Case, traits: TrainerTraits, rank: int, length: int) -> Iterable[Flow]:
    """In every layer each rank needs the keys and values of all cp ranks, once forward and once more backward.

    They are of all heads that tp left here (of which ones: `cp_heads`). all_gather brings them at once; alltoall passes
    them on to the next rank, cp - 1 times. Their gradients are always passed on, cp times, until each is back where its
    keys are: in float64 as they are, else in float32, in which they are summed up. A compiler sees that it is the same
    keys and values twice: it keeps those of forward for backward.
    """
    dims, training = case.dims, case.training
    if dims.cp == 1:
        return
    again = not case.features.compile
    layers = sum(len(layers_of_stage(case, stage)) for stage in stages_of_rank(case, rank))
    dtype = training.compute_dtype or training.dtype
    width = cp_width(case, traits)
    passed = 2 * layers * case.passes * case.local_batch * (length // dims.cp) * width // dims.tp
    if case.features.cp_rotation == "allgather":
        yield Flow("cp", "keys and values", "all_gather", "forward", dims.cp * passed * BYTES[dtype])
        yield Flow("cp", "keys and values", "all_gather", "backward", again * dims.cp * passed * BYTES[dtype])
    else:
        yield Flow("cp", "keys and values", "all_to_all", "forward", (dims.cp - 1) * passed * BYTES[dtype])
        yield Flow("cp", "keys and values", "all_to_all", "backward", again * (dims.cp - 1) * passed * BYTES[dtype])
    summed = BYTES["float64" if dtype == "float64" else "float32"]
    yield Flow("cp", "gradients of keys and values", "all_to_all", "backward", dims.cp * passed * summed)


def cp_width(case: Case, traits: TrainerTraits) -> int:
    """Elements of the keys exchanged for a token, and of the values."""
    return (case.model.n_heads if traits.cp_heads == "query" else case.model.n_kv_heads) * case.model.head_dim
