"""Elements of whole parameters that a rank holds, as its DTensors and FSDP1's vectors claim; a plain tensor is whole.

What is claimed must fit the number of elements that are held. Where it does not, or nothing says where a slice lies,
the reason is kept, and nothing is guessed.
"""

from __future__ import annotations

import fnmatch
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

from harness.core.probe.structure import join_names, local_tensor_of, module_names, plain_fqn, sharded_parameters
from harness.recording.sketches import Box, text_of_boxes

Intervals = tuple[tuple[int, int], ...]
MOST_INTERVALS = 4096
"""Intervals of columns of one slice."""
TP_AXIS_NAMES = ("tp", "tensor", "tensor_parallel")
"""Names of a mesh's axis of which ranks compute parts of the same samples."""


@dataclass(frozen=True)
class LocalShard:
    """Slice of one parameter that a rank holds, or the reason why it is not known which one."""

    fqn: str
    """Parameter's fqn, without what wrappers put into it."""
    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    owner: torch.Tensor
    """The tensor that the module has, whose gradient and optimizer state lie in the same way."""
    boxes: tuple[Box, ...] = ()
    """Elements of the whole parameter, in the order in which the slice has them."""
    addend: str = ""
    """Which part of a sum this is, where the placement is Partial."""
    span: tuple[int, int] | None = None
    """Elements of the owner that these are; None for all of them."""
    plain: bool = False
    """Whether nothing claims or declares anything of it, so that it counts as whole."""
    tp: tuple[int, ...] = ()
    """Ranks that hold its parts for tensor parallelism; empty where nothing claims or declares that it is cut so."""
    why: str = ""
    """Reason why it is not known which elements these are; empty where it is."""

    @property
    def slice_text(self) -> str:
        """Return in words which elements these are."""
        return text_of_boxes(self.boxes, self.addend)

    @functools.cached_property
    def elements(self) -> int:
        """The number of elements of the whole parameter that these are."""
        return sum(math.prod(box.size) for box in self.boxes)

    def elements_of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return these elements, in a row, of the owner or of a tensor that lies as it does."""
        flat = local_tensor_of(tensor).reshape(-1)
        return flat if self.span is None else flat[slice(*self.span)]


def rows_between(
    values: torch.Tensor, boxes: Iterable[Box], start: int, stop: int
) -> tuple[list[torch.Tensor], list[Box]]:
    """Return the elements that lie in rows start to stop (exclusive) of the whole parameter, and the boxes that they
    make up.

    Both lists have one entry for each run of rows; they are empty if no element lies there. values: those of all boxes,
    in a row. The elements are views.
    """
    slices = list[torch.Tensor]()
    slice_boxes = list[Box]()
    begin = 0
    for box in boxes:
        rows, columns = box.size
        matrix = values[begin : begin + rows * columns].view(rows, columns)
        row_offset = 0
        for low, high in box.rows:
            first = max(low, start)
            end = min(high, stop)
            if first < end:
                slices.append(matrix[row_offset + first - low : row_offset + end - low].reshape(-1))
                slice_boxes.append(Box(((first, end),), box.columns))
            row_offset += high - low
        begin += rows * columns
    return slices, slice_boxes


def local_shards_of(parts: Sequence[nn.Module], sharded: Iterable[DeclaredSharding] = ()) -> Iterator[LocalShard]:
    """Yield the local shard of each trainable parameter of the models once. Frozen parameters are left out.

    FSDP1's come first, as slices of its vectors. sharded: what somebody declared of plain tensors.
    """
    vector_shards = dict(_fsdp1_shards(parts))
    vector_owner_ids = set[int]()
    for shards in vector_shards.values():
        vector_owner_ids.update(id(shard.owner) for shard in shards)
    for shards in vector_shards.values():
        yield from shards
    declared = tuple(sharded)
    yielded_ids = set[int]()
    for fqn, parameter in sharded_parameters(parts):
        if id(parameter) not in vector_owner_ids | yielded_ids and parameter.requires_grad:
            yielded_ids.add(id(parameter))
            yield _shard_of_parameter(fqn, parameter, declared)


@dataclass(frozen=True)
class DeclaredSharding:
    """What somebody declared: plain tensors of which each rank holds one of several equal parts."""

    pattern: str
    """Shell pattern of parameters' names."""
    dim: int
    """Dim of the whole tensor along which it is cut."""
    shard_count: int
    """How many parts there are."""
    shard_index: int
    """Which one this rank holds."""
    tp: tuple[int, ...] = ()
    """Ranks that hold the parts, if it is cut for tensor parallelism."""

    def applies_to(self, fqn: str) -> bool:
        """Return whether the declaration is of this parameter."""
        return fnmatch.fnmatchcase(fqn, self.pattern)


def _shard_of_parameter(fqn: str, parameter: torch.Tensor, declared: Sequence[DeclaredSharding]) -> LocalShard:
    """Return the local shard of one parameter: a DTensor's, a declared one, or a whole plain tensor.

    The first declaration that applies counts. `why` says so if it names a dim that the tensor lacks.
    """
    shape = tuple(parameter.shape)
    if hasattr(parameter, "device_mesh"):
        return shard_of_dtensor(fqn, parameter)
    if declaration := next((candidate for candidate in declared if candidate.applies_to(fqn)), None):
        dims = [((0, size),) for size in shape]
        if declaration.dim >= len(shape):
            return LocalShard(
                fqn, shape, parameter, why=f"declared to be cut along dim {declaration.dim}, and has {len(shape)} dims"
            )
        size = shape[declaration.dim]
        dims[declaration.dim] = ((declaration.shard_index * size, (declaration.shard_index + 1) * size),)
        shape = (*shape[: declaration.dim], size * declaration.shard_count, *shape[declaration.dim + 1 :])
        return LocalShard(fqn, shape, parameter, boxes_of_dims(shape, dims), tp=declaration.tp)
    return LocalShard(fqn, shape, parameter, boxes_of_dims(shape, [((0, size),) for size in shape]), plain=True)


def shard_of_dtensor(fqn: str, parameter: Any) -> LocalShard:
    """Return the slice that this rank holds of a DTensor.

    Where it is not known, `why` has the reason, and there are no boxes. That is a rank outside of its mesh, too many
    pieces, or placements that do not fit the elements held. Placements are followed in torch's order of cuts.
    """
    shape = tuple(parameter.shape)
    mesh = parameter.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return LocalShard(fqn, shape, parameter, why="this rank is not in its mesh")
    dims: list[Intervals] = [((0, size),) for size in shape]
    addend_indices = []
    placed = [*zip(parameter.placements, mesh.shape, coordinate, strict=True)]
    for placement, count, index, strides in _in_order_of_cuts(placed):
        if hasattr(placement, "dim"):
            dims[placement.dim] = chunk_of(dims[placement.dim], count, index, strides)
        elif placement.is_partial():
            addend_indices.append(str(index))
    boxes = boxes_of_dims(shape, dims)
    shard = LocalShard(fqn, shape, parameter, boxes, ",".join(addend_indices), tp=_tp_ranks(parameter, coordinate))
    if not boxes and all(_length(dim) for dim in dims):
        return LocalShard(fqn, shape, parameter, why=f"its slice is of more than {MOST_INTERVALS} pieces")
    if shard.elements != local_tensor_of(parameter).numel():
        why = f"its placements claim {shard.elements} elements, and it holds {local_tensor_of(parameter).numel()}"
        return LocalShard(fqn, shape, parameter, why=why)
    return shard


def _tp_ranks(parameter: Any, coordinate: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks, sorted, over which tensor parallelism cuts this parameter; empty if it does not.

    They lie along the first axis of its mesh that is named for tensor parallelism and cuts it. coordinate: this rank's,
    in that mesh.
    """
    mesh = parameter.device_mesh
    for axis, name in enumerate(mesh.mesh_dim_names or ()):
        if name in TP_AXIS_NAMES and mesh.shape[axis] > 1 and hasattr(parameter.placements[axis], "dim"):
            axis_ranks = mesh.mesh[(*coordinate[:axis], slice(None), *coordinate[axis + 1 :])]
            return tuple(sorted(axis_ranks.tolist()))
    return ()


def _in_order_of_cuts(placed: Sequence[tuple[Any, int, int]]) -> Iterator[tuple[Any, int, int, int]]:
    """Yield (placement, parts, index of this rank's part, strides) of each mesh axis, in the order in which torch cuts.

    That is from the first axis to the last. Strided shards come last, for the later axes had cut the dim already: parts
    that are not of one size show it. placed: by axis, (placement, parts, index).
    """
    strided_shards = []
    for axis, (placement, count, index) in enumerate(placed):
        strides = getattr(placement, "split_factor", 1)
        later_counts = (
            later_count
            for later_placement, later_count, _ in placed[axis + 1 :]
            if getattr(later_placement, "dim", None) == getattr(placement, "dim", -1)
        )
        if strides > 1 and math.prod(later_counts) == strides:
            strided_shards.append((placement, count, index, 1))
        else:
            yield placement, count, index, strides
    yield from reversed(strided_shards)


def _length(intervals: Intervals) -> int:
    return sum(stop - start for start, stop in intervals)


def chunk_of(intervals: Intervals, count: int, index: int, strides: int) -> Intervals:
    """Return the intervals of one of `count` parts, as torch.chunk cuts them; empty if the part is.

    Of a strided shard it is its chunk of each stride. index: of the part, from 0.
    """
    size = _length(intervals)
    chunks = count * strides
    chunk_size = -(-size // chunks) if size else 0
    chunk_numbers = [index + count * stride for stride in range(strides)]
    pieces = (
        _elements_between(intervals, number * chunk_size, min(size, (number + 1) * chunk_size))
        for number in chunk_numbers
    )
    return _merge_adjacent(itertools.chain.from_iterable(pieces))


def _elements_between(intervals: Intervals, first: int, last: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals of the elements from the first to before the last, counted over all intervals in a row."""
    for start, stop in intervals:
        size = stop - start
        if first < size and last > 0 and first < last:
            yield start + max(first, 0), start + min(last, size)
        first -= size
        last -= size


def _merge_adjacent(intervals: Iterable[tuple[int, int]]) -> Intervals:
    """Return the intervals with neighbours merged that touch. Precondition: they ascend."""
    merged: list[tuple[int, int]] = []
    for start, stop in intervals:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], stop)
        else:
            merged.append((start, stop))
    return tuple(merged)


def boxes_of_dims(shape: Sequence[int], dims: Sequence[Intervals]) -> tuple[Box, ...]:
    """Return the box of a slice in the whole parameter, taken as a matrix of shape[0] rows. dims: by dim, the intervals
    that it has.

    Empty if the slice is empty, or has more than MOST_INTERVALS pieces. A scalar is one row and one column.
    """
    if not dims:
        return (Box(((0, 1),), ((0, 1),)),)
    columns: Intervals = ((0, 1),)
    width = 1
    for size, intervals in zip(reversed(shape[1:]), reversed(dims[1:]), strict=True):
        if columns == ((0, width),):  # all of the dims behind it
            columns = tuple((start * width, stop * width) for start, stop in intervals)
        else:
            indices = [*itertools.chain.from_iterable(range(start, stop) for start, stop in intervals)]
            if len(indices) * len(columns) > MOST_INTERVALS:
                return ()
            columns = tuple(_repeated_intervals(columns, indices, width))
        width *= size
    box = Box(dims[0], columns)
    return (box,) if math.prod(box.size) else ()


def _repeated_intervals(intervals: Intervals, indices: Iterable[int], width: int) -> Iterator[tuple[int, int]]:
    """Yield the intervals of one block of `width` columns once for each block that these indices name."""
    for index in indices:
        for start, stop in intervals:
            yield index * width + start, index * width + stop


# ---- FSDP1


def _fsdp1_shards(parts: Iterable[nn.Module]) -> Iterator[tuple[str, list[LocalShard]]]:
    """Yield (name, shards) of each module that FSDP1 wraps: the slices of its parameters in this rank's part of its vector."""
    for model in parts:
        for module, name in module_names(model).items():
            flat: Any = getattr(getattr(module, "_handle", None), "flat_param", None)
            if isinstance(module, FullyShardedDataParallel) and flat is not None:
                yield name, [*_shards_of_vector(name, flat)]


def _shards_of_vector(module: str, flat: Any) -> Iterator[LocalShard]:
    """Yield the slice of each parameter of a vector that this rank holds: an interval of the vector, which may be
    empty.

    The owner is the module's own parameter where FSDP1 keeps one, else the vector. If FSDP1 does not say which elements
    these are, `why` does.
    """
    own_parameters = getattr(flat, "_params", None) or [None] * len(flat._fqns)
    shard_infos = getattr(flat, "_shard_param_infos", ())
    has_extensions = any(getattr(flat, "_param_extensions", ()) or ())
    if has_extensions or len(shard_infos) != len(flat._fqns):
        why = "FSDP1 does not say which elements of its vector these are"
        yield from (
            LocalShard(join_names(module, plain_fqn(fqn)), tuple(shape), flat, why=why)
            for fqn, shape in _names_and_shapes(flat)
        )
        return
    for (fqn, shape), info, parameter in zip(_names_and_shapes(flat), shard_infos, own_parameters, strict=True):
        boxes: tuple[Box, ...] = ()
        if info.in_shard:
            boxes = rows_of_interval(tuple(shape), info.intra_param_start_idx, info.intra_param_end_idx + 1)
        span = None
        if parameter is None:
            span = (info.offset_in_shard, info.offset_in_shard + info.numel_in_shard) if info.in_shard else (0, 0)
        yield LocalShard(
            join_names(module, plain_fqn(fqn)), tuple(shape), flat if parameter is None else parameter, boxes, "", span
        )


def _names_and_shapes(flat: Any) -> Iterator[tuple[str, Any]]:
    """Yield name and shape of each parameter of a vector."""
    return zip(flat._fqns, flat._shapes, strict=True)


def rows_of_interval(shape: Sequence[int], start: int, stop: int) -> tuple[Box, ...]:
    """Return the boxes of the elements from start to before stop, counted in a tensor's own order.

    Empty if there are none. They are a part of a row, whole rows, and a part of a row; each may be missing.
    """
    width = math.prod(shape[1:])
    first = start // width
    last = stop // width
    if first == last:
        return (Box(((first, first + 1),), ((start - first * width, stop - first * width),)),) if stop > start else ()
    boxes = []
    if start > first * width:
        boxes.append(Box(((first, first + 1),), ((start - first * width, width),)))
        first += 1
    if last > first:
        boxes.append(Box(((first, last),), ((0, width),)))
    if stop > last * width:
        boxes.append(Box(((last, last + 1),), ((0, stop - last * width),)))
    return tuple(boxes)
