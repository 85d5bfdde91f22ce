"""The slice of each parameter that a rank holds: cut by tp, then by FSDP on dim 0 or as `cut_dims` says, or flat (FSDP1, ZeRO).

Trap: cuts are torch.chunk's, ceil(n / parts) each, so that the last ranks may hold less, or nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.case.traits import USUAL_TRAITS, TrainerTraits
from harness.core.plan.grid import coordinate_of_rank, shard_degree_and_index
from harness.reference.config import ModelConfig

Interval = tuple[int, int]
Slice = tuple[Interval, ...]
"""Half-open intervals of the full tensor, one a dim; of a flattened parameter one interval of its elements.

A slice with an empty interval holds nothing."""


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
class FlatUnit:
    """A module's parameters one after the other in a vector, which FSDP1 or ZeRO cuts in equal parts, one a rank."""

    starts: dict[str, tuple[int, ...]]
    """Fqn -> where each of the parameter's equal blocks begins. A parameter has one block, but for parts of a fused tensor
    that has several of each."""
    numel: int
    """Elements of the vector, before it is padded to equal parts."""
    multiple: int = 1
    """Number of which each part's elements are a multiple."""
    whole: int = 1
    """Number of which the padded vector's elements are a multiple."""

    def elements_per_rank(self, degree: int) -> int:
        """Return the number of elements, padding included, of each rank's part, if the vector is cut over `degree`
        ranks."""
        padded = math.lcm(degree * self.multiple, self.whole)
        return -(-self.numel // padded) * padded // degree

    def elements_between(self, fqn: str, size: int, first: int, last: int) -> Interval:
        """Return the interval of a parameter's elements that lies from `first` to `last` of the vector; begin equals
        end if none does.

        size: the parameter's number of elements. They are one interval, for its blocks follow each other in its own
        order.
        """
        starts = self.starts[fqn]
        block = size // len(starts)

        def elements_before(end: int) -> int:
            return sum(min(max(end - start, 0), block) for start in starts)

        return elements_before(first), elements_before(last)


def chunk_interval(interval: Interval, parts: int, index: int) -> Interval:
    """Return the index-th of `parts` chunks of an interval, as torch.chunk cuts; the last ones may be shorter or empty."""
    start, stop = interval
    size = -(-(stop - start) // parts)
    return min(start + index * size, stop), min(start + (index + 1) * size, stop)


def slices_of_rank(
    dims: ParallelDims, rank: int, shapes: Mapping[str, tuple[int, ...]], traits: TrainerTraits = USUAL_TRAITS
) -> dict[str, Slice]:
    """Return the rank's slice of each parameter of these shapes, by fqn: cut by tp first, then by data-parallel
    sharding."""
    tp = (dims.tp, coordinate_of_rank(dims, rank)["tp"])
    shard = shard_degree_and_index(dims, rank)
    cuts = traits.measured.cut_dims
    return {fqn: slice_of(fqn, shape, tp, shard, cuts.get(fqn, 0)) for fqn, shape in shapes.items()}


def flat_units(case: Case, order: Sequence[str] = ()) -> tuple[FlatUnit, ...]:
    """Return FSDP1's vectors: the root's first, with all that is in no block, then one for each block.

    Each parameter begins at a multiple of 16 bytes. order: fqns in the order in which they follow each other in a
    vector; what it does not name follows behind, in the reference's order.
    """
    index_of = {fqn: index for index, fqn in enumerate(order)}
    names = sorted(parameter_shapes(case.model), key=lambda fqn: index_of.get(fqn, len(index_of)))
    root = [fqn for fqn in names if not fqn.startswith("layers.")]
    units = [_flat_unit(case, root)]
    for layer in range(case.model.n_layers):
        units.append(_flat_unit(case, [fqn for fqn in names if fqn.startswith(f"layers.{layer}.")]))
    return tuple(units)


def _flat_unit(case: Case, names: list[str]) -> FlatUnit:
    """Return the vector of these parameters, in this order, each at a multiple of 16 bytes."""
    aligned = 16 // BYTES[case.training.dtype]
    end = 0
    starts = dict[str, tuple[int, ...]]()
    for fqn in names:
        start = -(-end // aligned) * aligned
        starts[fqn] = (start,)
        end = start + math.prod(parameter_shapes(case.model)[fqn])
    return FlatUnit(starts, end)


def flat_slices(
    units: Iterable[FlatUnit],
    shapes: Mapping[str, tuple[int, ...]],
    degree: int,
    index: int,
    tp: tuple[int, int] = (1, 0),
) -> dict[str, Slice]:
    """Return the slice of each flattened parameter in the index-th of `degree` equal parts of its unit, by fqn; it may
    be empty.

    tp: (degree, index) in tensor parallel. What tp cuts is flattened rank by rank: one tp rank's elements lie behind
    the other's.
    """
    slices: dict[str, Slice] = {}
    for unit in units:
        first = index * unit.elements_per_rank(degree)
        for fqn in unit.starts.keys() & shapes.keys():
            size = local_numel(fqn, shapes[fqn], tp[0])
            before = size * tp[1] if tp_dim(fqn) is not None else 0
            begin, end = unit.elements_between(fqn, size, first, first + unit.elements_per_rank(degree))
            slices[fqn] = ((before + begin, before + end),)
    return {fqn: slices[fqn] for fqn in shapes}


def local_numel(fqn: str, shape: tuple[int, ...], degree: int) -> int:
    """Return the elements that each of `degree` tensor parallel ranks has of a parameter that they divide evenly."""
    return math.prod(shape) // (degree if tp_dim(fqn) is not None else 1)


def slice_of(fqn: str, shape: tuple[int, ...], tp: tuple[int, int], shard: tuple[int, int], cut_dim: int = 0) -> Slice:
    """Return the slice of a parameter on a rank at (degree, index) of tp and, inside it, at (degree, index) of sharding.

    cut_dim: the dim that sharding cuts.
    """
    return _cached_slice(tp_dim(fqn), shape, tp, shard, cut_dim)


@functools.lru_cache(maxsize=2**15)
def _cached_slice(
    dim: int | None, shape: tuple[int, ...], tp: tuple[int, int], shard: tuple[int, int], cut_dim: int
) -> Slice:
    """Return the slice of a parameter whose dim tp cuts; None: tp cuts none.

    Results are cached: all layers are cut alike, so that ranks by the thousand share these. A recorded parameter may have no
    dim to be cut.
    """
    intervals = [(0, size) for size in shape]
    if dim is not None and dim < len(shape):
        intervals[dim] = chunk_interval(intervals[dim], *tp)
    if cut_dim < len(shape):
        intervals[cut_dim] = chunk_interval(intervals[cut_dim], *shard)
    return tuple(intervals)


@functools.lru_cache(maxsize=2**14)
def tp_dim(fqn: str) -> int | None:
    """Return the dim that tensor parallel cuts. None for a parameter that every tp rank holds whole.

    An adapter has one part that is cut as its matrix is: B by rows, or A by columns.
    """
    module, _, adapter = fqn.removesuffix(".weight").partition(".lora_")
    dim = next((dim for suffix, dim in TP_DIM.items() if module == suffix or module.endswith("." + suffix)), None)
    return dim if not adapter or dim == {"a": 1, "b": 0}[adapter] else None


def numel(part: Slice) -> int:
    """Return the elements of a slice."""
    return math.prod(stop - start for start, stop in part)


def slice_text(part: Slice, shape: tuple[int, ...], *, flat: bool = False) -> str:
    """Return a slice as a person reads it: "1/8 of dim 0 [0:32]", "1/8 of its elements [0:2048]" or "whole".

    One that is no such part is "[0:8208] of 16384 elements" or "[0:3] of 7 in dim 0".
    An empty one is "nothing of dim 0 [32:32]". flat: whether the shape is that of a flattened parameter.
    """
    cuts = []
    for dim, ((start, stop), size) in enumerate(zip(part, shape, strict=True)):
        if (start, stop) != (0, size):
            interval = f"[{start}:{stop}]"
            if stop > start and size % (stop - start):
                cuts.append(f"{interval} of {size} elements" if flat else f"{interval} of {size} in dim {dim}")
                continue
            share = f"1/{size // (stop - start)}" if stop > start else "nothing"
            cuts.append(f"{share} of {'its elements' if flat else f'dim {dim}'} {interval}")
    return ", ".join(cuts) or "whole"


@functools.cache
def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of each parameter of a model, by fqn, cached; it must not be changed.

    Every parameter and rank needs them, and making them took 25 s for 405B on 32 ranks.
    """
    return model.parameter_shapes()


def padded_numel(case: Case, traits: TrainerTraits, fqn: str, tp_index: int) -> int:
    """Return the number of elements that FSDP2 moves for a parameter, as `padded_numels` has it."""
    return padded_numels(case, traits, tp_index)[fqn]


def padded_numels(case: Case, traits: TrainerTraits, tp_index: int) -> Mapping[str, int]:
    """Return the number of elements that FSDP2 moves for each parameter, by fqn: its tp part, padded along the dim that
    FSDP2 cuts.

    That dim is padded to a multiple of the shard degree.
    """
    cut_dims = tuple(sorted(traits.measured.cut_dims.items()))
    return _padded_numels(case.model, case.dims.tp, tp_index, case.data_dims.shards, cut_dims)


@functools.lru_cache(maxsize=128)
def _padded_numels(
    model: ModelConfig, tp: int, tp_index: int, degree: int, cut_dims: tuple[tuple[str, int], ...]
) -> Mapping[str, int]:
    """Return `padded_numels`, cached: plans of large models ask for it for every rank and unit."""
    cut_dim_by_fqn = dict(cut_dims)
    numels = {}
    for fqn, whole_shape in parameter_shapes(model).items():
        shape = list(whole_shape) or [1]
        dim = tp_dim(fqn)
        if dim is not None and dim < len(shape):
            start, stop = chunk_interval((0, shape[dim]), tp, tp_index)
            shape[dim] = stop - start
        cut_dim = cut_dim_by_fqn.get(fqn, 0)
        shape[cut_dim] = -(-shape[cut_dim] // degree) * degree
        numels[fqn] = math.prod(shape)
    return numels
