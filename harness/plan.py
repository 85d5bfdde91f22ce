"""What must be true of a case, by arithmetic alone: no torch, no DeviceMesh, nothing that a trainer uses.

The rank grid is arange(world_size) reshaped to the degrees, outermost axis first (pp, dp_replicate, dp_shard, cp, tp).
Groups are its lines. Tensor parallel cuts a parameter along one dim, data-parallel sharding then cuts dim 0 of what is
left; both cut as torch.chunk does: equal chunks of ceil(n / parts), the last ones shorter or empty.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from harness.case import AXES, Case, CaseError, ParallelDims
from reference.config import ModelConfig

Interval = tuple[int, int]
Slice = tuple[Interval, ...]
"""Half-open intervals of the full tensor, one a dim. A slice with an empty interval holds nothing."""

# Which dim tensor parallel cuts: 0 for column-parallel weights and the vocabulary, 1 for row-parallel weights.
# Norm weights are whole on every tp rank. (Llama's layout in Megatron-LM and torchtitan.)
TP_DIM = {
    "tok_embeddings": 0,
    "output": 0,
    "attention.wq": 0,
    "attention.wk": 0,
    "attention.wv": 0,
    "attention.wo": 1,
    "feed_forward.w1": 0,
    "feed_forward.w2": 1,
    "feed_forward.w3": 0,
}

BYTES = {"float64": 8, "float32": 4, "bfloat16": 2}


@dataclass(frozen=True)
class Flow:
    """Bytes that one rank must move over one axis in every step, for one purpose.

    Bytes count the unsharded tensor (all_gather's output, reduce_scatter's input, all_reduce's tensor), so they depend
    neither on bucketing nor on the algorithm behind the collective. optional: a trainer may as well do this outside of
    forward and backward, where it cannot be told from other small collectives; done inside, it has these bytes.
    """

    axis: str
    role: str
    op: str
    phase: str
    bytes: int
    optional: bool = False


@dataclass(frozen=True)
class Plan:
    """groups: by axis of degree above 1, its groups' ranks. slices[rank][fqn]: what each rank must hold.

    flows[rank]: its traffic in every step. parameter_bytes[rank]: (least, most) bytes of parameters a
    rank may keep between steps; the most counts the padding of uneven chunks. outside_bytes[rank]: the most it may move
    in a step outside forward and backward, where nobody plans (loss statistics, norms, counts, norm weights' gradients).
    """

    dims: ParallelDims
    shapes: dict[str, tuple[int, ...]]
    groups: dict[str, tuple[tuple[int, ...], ...]]
    slices: dict[int, dict[str, Slice]]
    flows: dict[int, tuple[Flow, ...]]
    parameter_bytes: dict[int, tuple[int, int]]
    outside_bytes: int

    def group_of(self, rank: int, axis: str) -> tuple[int, ...]:
        return next(group for group in self.groups[axis] if rank in group)


def rank_grid(dims: ParallelDims) -> np.ndarray:
    return np.arange(dims.world_size).reshape(dims.degrees)


def coordinate(dims: ParallelDims, rank: int) -> dict[str, int]:
    place = np.unravel_index(rank, dims.degrees)
    return {axis: int(index) for axis, index in zip(AXES, place, strict=True)}


def groups(dims: ParallelDims, *axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ only along `axes`, each ascending; a partition of the world."""
    grid = rank_grid(dims)
    moved = np.moveaxis(grid, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
    lines = moved.reshape(-1, math.prod(getattr(dims, axis) for axis in axes))
    return tuple(tuple(sorted(int(rank) for rank in line)) for line in lines)


def make_plan(case: Case) -> Plan:
    """Raises CaseError for axes that the plan does not cover yet."""
    dims = case.dims
    if dims.pp > 1 or dims.cp > 1:
        raise CaseError(f"{case.file}: case {case.name!r}: pp and cp are not planned yet; leave both at 1")
    shapes = case.model.parameter_shapes()
    slices = {rank: slices_of_rank(dims, rank, shapes) for rank in range(dims.world_size)}
    return Plan(
        dims=dims,
        shapes=shapes,
        groups={axis: groups(dims, axis) for axis in AXES if getattr(dims, axis) > 1},
        slices=slices,
        flows={rank: _flows(case, rank) for rank in slices},
        outside_bytes=_outside_bytes(case),
        parameter_bytes={rank: _parameter_bytes(case, rank, slices[rank]) for rank in slices},
    )


# ---- slices


def chunk(interval: Interval, parts: int, index: int) -> Interval:
    """The index-th of `parts` chunks of an interval, as torch.chunk cuts."""
    start, stop = interval
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def slices_of_rank(dims: ParallelDims, rank: int, shapes: dict[str, tuple[int, ...]]) -> dict[str, Slice]:
    at = coordinate(dims, rank)
    shard = (dims.dp_shard * dims.cp, at["dp_shard"] * dims.cp + at["cp"])
    return {fqn: slice_of(fqn, shape, (dims.tp, at["tp"]), shard) for fqn, shape in shapes.items()}


def slice_of(fqn: str, shape: tuple[int, ...], tp: tuple[int, int], shard: tuple[int, int]) -> Slice:
    """The part of a parameter at place (degree, index) of tensor parallel and, inside it, of data-parallel sharding."""
    intervals = [(0, size) for size in shape]
    dim = tp_dim(fqn)
    if dim is not None:
        intervals[dim] = chunk(intervals[dim], *tp)
    intervals[0] = chunk(intervals[0], *shard)
    return tuple(intervals)


def tp_dim(fqn: str) -> int | None:
    """The dim that tensor parallel cuts, None for a parameter that every tp rank holds whole."""
    module = fqn.removesuffix(".weight")
    return next((dim for suffix, dim in TP_DIM.items() if module == suffix or module.endswith("." + suffix)), None)


def numel(part: Slice) -> int:
    return math.prod(stop - start for start, stop in part)


def slice_text(part: Slice, shape: tuple[int, ...]) -> str:
    """A slice as a person reads it: "1/8 of dim 0 (rows 0-31)" or "whole"."""
    cuts = []
    for dim, ((start, stop), size) in enumerate(zip(part, shape, strict=True)):
        if (start, stop) != (0, size):
            parts = size / (stop - start) if stop > start else math.inf
            share = "nothing" if stop == start else f"1/{parts:.3g}"
            cuts.append(f"{share} of dim {dim} [{start}:{stop}]")
    return ", ".join(cuts) or "whole"


# ---- traffic and memory


def fsdp_units(case: Case) -> list[tuple[list[str], bool]]:
    """Parameters gathered together, and whether they are freed after forward and gathered again for backward.

    The default policy keeps the last unit (final norm and output): its backward follows at once (torchtitan's policy).
    A tied embedding is the output's weight and belongs to that unit.
    """
    names = list(case.model.parameter_shapes())
    policy = case.features.reshard_after_forward
    blocks = [[n for n in names if n.startswith(f"layers.{layer}.")] for layer in range(case.model.n_layers)]
    last = ["norm.weight", "tok_embeddings.weight" if case.model.tied_embeddings else "output.weight"]
    first = [name for name in ("tok_embeddings.weight",) if name not in last]
    again = policy != "never"
    return [(unit, again) for unit in (first, *blocks) if unit] + [(last, policy == "always")]


def _flows(case: Case, rank: int) -> tuple[Flow, ...]:
    tp_index = coordinate(case.dims, rank)["tp"]
    flows = (*_data_parallel_flows(case, tp_index), *_tensor_parallel_flows(case))
    return tuple(flow for flow in flows if flow.bytes)


@functools.cache
def _shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Asked for once a parameter and rank: made anew each time it took 25 s for 405B on 32 ranks."""
    return model.parameter_shapes()


def _padded_numel(case: Case, fqn: str, tp_index: int) -> int:
    """Elements FSDP2 moves for a parameter: its tp part with dim 0 padded to a multiple of the shard degree."""
    shape = list(_shapes(case.model)[fqn])
    dim = tp_dim(fqn)
    if dim is not None:
        start, stop = chunk((0, shape[dim]), case.dims.tp, tp_index)
        shape[dim] = stop - start
    ways = case.dims.dp_shard * case.dims.cp
    return -(-shape[0] // ways) * ways * math.prod(shape[1:])


def _data_parallel_flows(case: Case, tp_index: int) -> Iterable[Flow]:
    dims, features = case.dims, case.features
    stored = case.training.dtype
    gathered = BYTES[features.param_dtype or stored]
    reduced = BYTES[features.reduce_dtype or features.param_dtype or stored]
    units = fsdp_units(case)
    everything = sum(_padded_numel(case, fqn, tp_index) for unit, _ in units for fqn in unit)
    again = sum(_padded_numel(case, fqn, tp_index) for unit, resharded in units if resharded for fqn in unit)
    shards = dims.dp_shard * dims.cp
    if shards > 1:
        times = features.accumulation
        yield Flow("dp_shard", "parameters", "all_gather", "forward", times * everything * gathered)
        yield Flow("dp_shard", "parameters", "all_gather", "backward", times * again * gathered)
        yield Flow("dp_shard", "gradients", "reduce_scatter", "backward", everything * reduced)
    if dims.dp_replicate > 1:
        yield Flow("dp_replicate", "gradients", "all_reduce", "backward", everything // shards * reduced)


def _tensor_parallel_flows(case: Case) -> Iterable[Flow]:
    """Every crossing of the residual stream: into and out of attention and feed-forward, out of embedding, into output.

    With sequence parallel a crossing is an all_gather or a reduce_scatter, and backward mirrors forward. Without it, it
    is an all_reduce, forward of what comes out, backward of what went in.
    """
    dims, model, training = case.dims, case.model, case.training
    if dims.tp == 1:
        return
    size = BYTES[case.features.param_dtype or training.dtype]
    activation = case.local_batch * (training.seq_len // dims.cp) * model.dim * size * case.features.accumulation
    layers = model.n_layers
    if case.features.sequence_parallel:
        yield Flow("tp", "activations", "all_gather", "forward", (2 * layers + 1) * activation)
        yield Flow("tp", "activations", "reduce_scatter", "forward", (2 * layers + 1) * activation)
        yield Flow("tp", "activations", "all_gather", "backward", (2 * layers + 1) * activation)
        yield Flow("tp", "activations", "reduce_scatter", "backward", (2 * layers + 1) * activation)
        norms = (2 * layers + 1) * model.dim * size  # each rank's norms saw its part of the sequence
        yield Flow("tp", "norm gradients", "all_reduce", "backward", norms, optional=True)
    else:
        yield Flow("tp", "activations", "all_reduce", "forward", (2 * layers + 1) * activation)
        yield Flow("tp", "activations", "all_reduce", "backward", (2 * layers + 1) * activation)
    if not case.features.loss_parallel:
        vocabulary = -(-model.vocab_size // dims.tp) * dims.tp  # gathered in equal parts
        yield Flow("tp", "logits", "all_gather", "forward", activation // model.dim * vocabulary)


def _outside_bytes(case: Case) -> int:
    """Eight numbers a token (loss parallel exchanges three) and a tenth of the parameters: far from gathering them."""
    tokens = case.local_batch * case.features.accumulation * case.training.seq_len
    parameters = sum(math.prod(shape) for shape in case.model.parameter_shapes().values())
    return (8 * tokens + parameters // 10) * BYTES[case.training.dtype]


def _parameter_bytes(case: Case, rank: int, held: dict[str, Slice]) -> tuple[int, int]:
    tp_index = coordinate(case.dims, rank)["tp"]
    size = BYTES[case.training.dtype]
    ways = case.dims.dp_shard * case.dims.cp
    least = sum(numel(part) for part in held.values()) * size
    most = sum(_padded_numel(case, fqn, tp_index) // ways for fqn in held) * size
    return least, max(least, most)
