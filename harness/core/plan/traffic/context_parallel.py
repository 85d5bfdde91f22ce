"""Traffic of context parallelism: the K/V exchange over cp, forward and backward."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.plan.slices import BYTES
from harness.core.plan.stages import layers_of_stage, stages_of_rank
from harness.core.plan.traffic.flow import Flow


def context_parallel_flows(case: Case, traits: TrainerTraits, rank: int, length: int) -> Iterable[Flow]:
    """Yield the K/V exchange: in every layer each rank needs the keys and values of all cp ranks, forward and backward.

    Nothing without cp. Keys and values have `n_heads / tp` heads where the trainer exchanges them after GQA expansion,
    else `n_kv_heads / tp`: `TrainerTraits.cp_heads`. all_gather brings those of all ranks at once; alltoall passes them
    on to the next rank, cp - 1 times; a trainer may send and receive instead: `TrainerTraits.cp_sends`. Gradients of
    keys and values are passed on cp times and summed up on the way, until each is where its keys are. Their dtype is
    float64 where that is computed in, else float32. torch.compile keeps forward's keys and values for backward, which
    then gathers none. A trainer may gather them once and reduce-scatter their gradients in the dtype computed in:
    `TrainerTraits.cp_gathers`.

    An example: cp 2, float64, 4 layers, batch 2, 32 tokens a sample, 8 heads of 8. A rank has 2 (keys, values) x 4 x 2
    x 32/2 x 64 = 16,384 elements. An all_gather's output, which is what counts, is cp times that: 262,144 bytes.
    """
    dims = case.dims
    training = case.training
    if dims.cp == 1:
        return
    again = not case.features.compile
    layers = sum(len(layers_of_stage(case, stage)) for stage in stages_of_rank(case, rank))
    dtype = training.compute_dtype or training.dtype
    width = cp_width(case, traits)
    passed = 2 * layers * case.passes * case.local_batch * (length // dims.cp) * width // dims.tp
    if traits.cp_gathers:
        yield Flow("cp", "keys and values", "all_gather", "forward", dims.cp * passed * BYTES[dtype])
        yield Flow("cp", "gradients of keys and values", "reduce_scatter", "backward", dims.cp * passed * BYTES[dtype])
        return
    if case.features.cp_rotation == "allgather":
        yield Flow("cp", "keys and values", "all_gather", "forward", dims.cp * passed * BYTES[dtype])
        yield Flow("cp", "keys and values", "all_gather", "backward", again * dims.cp * passed * BYTES[dtype])
    ops = ("send", "recv") if traits.cp_sends else ("all_to_all",)
    if case.features.cp_rotation == "alltoall":
        for op in ops:
            yield Flow("cp", "keys and values", op, "forward", (dims.cp - 1) * passed * BYTES[dtype])
            yield Flow("cp", "keys and values", op, "backward", again * (dims.cp - 1) * passed * BYTES[dtype])
    summed = BYTES["float64" if dtype == "float64" else "float32"]
    for op in ops:
        yield Flow("cp", "gradients of keys and values", op, "backward", dims.cp * passed * summed)


def cp_width(case: Case, traits: TrainerTraits) -> int:
    """Return the number of elements of the keys exchanged for one token, of all tp ranks; the values have as many."""
    return (case.model.n_heads if traits.cp_heads == "query" else case.model.n_kv_heads) * case.model.head_dim
