"""Weights that a trainer has fused into one tensor, separated: each part under its own name, as if it had been alone.

A part is one block of the fused tensor's rows (wq, wk, wv), or several. There may be one for each group of heads (wq, wk, wv,
wq, wk, wv, ..), or one for each tensor-parallel rank (w1, w3, w1, w3). A rank that holds every n-th part of the rows holds an
n-th of the fused tensor's blocks, whole. They are the same parts in the same order on every rank.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np

from harness.core.evidence.checkpoint_index import Checkpoint, SavedTensor
from harness.core.evidence.records import RankEvidence, Resumed, TensorEvidence

Block = tuple[str, int]
"""A part, and how many of its rows lie there together."""
Fused = Mapping[str, Sequence[Block]]
"""The name of a fused tensor -> its blocks, one below the other."""
Arrays = dict[str, np.ndarray]


def blocks_in_order(parts: Sequence[str], rows: Mapping[str, int]) -> tuple[Block, ...]:
    """Return the blocks of a fused tensor whose parts lie in this order.

    rows: of each part; a part that comes n times is cut into n equal blocks.
    """
    return tuple((part, rows[part] // parts.count(part)) for part in parts)


def local_blocks_of(whole: Sequence[Block], length: int) -> Sequence[Block]:
    """Return one rank's blocks: the run that, repeated for each rank, gives `whole`. Empty if there is none.

    length: number of rows that the rank has.
    """
    rows = sum(size for _, size in whole)
    degree = rows // length if length and rows % length == 0 else 0
    local_blocks = whole[: len(whole) // degree] if degree and len(whole) % degree == 0 else ()
    return local_blocks if list(local_blocks) * degree == list(whole) else ()


def rows_by_part(blocks: Sequence[Block]) -> dict[str, np.ndarray]:
    """Return, by part, the numbers of its rows (or elements) in the fused tensor, in the part's own order. int64 [rows]"""
    rows_of_blocks: dict[str, list[np.ndarray]] = {}
    start = 0
    for part, size in blocks:
        rows_of_blocks.setdefault(part, []).append(np.arange(start, start + size))
        start += size
    return {part: np.concatenate(rows) for part, rows in rows_of_blocks.items()}


@dataclass(frozen=True)
class FusedSlices:
    """The positions of parts in a rank's slices of fused tensors."""

    fused: Fused
    """Blocks of each fused tensor."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shape of the rank's slice of each parameter."""
    starts: Mapping[str, int]
    """Of a tensor of which the rank's gradient and optimizer state are an interval: the element at which that begins."""

    def elements_by_part(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return, by part, the numbers of its rows in a local array; of an interval of the flattened tensor its
        elements. int64.

        Empty for a tensor that is not fused, for a scalar, and where the rank's rows are not whole blocks: it stays as
        it is. A part without elements in the interval is left out.
        """
        whole = self.fused.get(name, ())
        if not whole or not array.ndim:
            return {}
        if array.ndim > 1 or name not in self.starts:
            return rows_by_part(local_blocks_of(whole, len(array)))
        rows, *columns = self.shapes[name]
        start = self.starts[name]
        stop = start + len(array)
        element_blocks = [(part, size * math.prod(columns)) for part, size in local_blocks_of(whole, rows)]
        elements_in_interval = {}
        for part, elements in rows_by_part(element_blocks).items():
            in_interval = elements[(elements >= start) & (elements < stop)] - start
            if in_interval.size:
                elements_in_interval[part] = in_interval
        return elements_in_interval


def split_fused(evidence: RankEvidence, fused: Fused, starts: Mapping[str, int] = MappingProxyType({})) -> RankEvidence:
    """Return the evidence with fused tensors separated, where the rank holds whole blocks, or intervals with given starts.

    Any other slice is left as it is, for no check covers its contents.
    """
    if not fused:
        return evidence
    cuts = FusedSlices(fused, {tensor.fqn: tensor.value.shape for tensor in evidence.parameters}, starts)
    steps = tuple(
        dataclasses.replace(
            step,
            gradients=_split_arrays(step.gradients, cuts),
            parameters=_split_arrays(step.parameters, cuts),
            optimizer_state=_split_states(step.optimizer_state, cuts),
            changed=None if step.changed is None else _split_arrays(step.changed, cuts),
        )
        for step in evidence.steps
    )
    parameters = tuple(itertools.chain.from_iterable(_split_tensor(tensor, cuts) for tensor in evidence.parameters))
    resumed = evidence.resumed and Resumed(
        _split_arrays(evidence.resumed.parameters, cuts), _split_states(evidence.resumed.optimizer_state, cuts)
    )
    return dataclasses.replace(evidence, steps=steps, parameters=parameters, resumed=resumed)


def split_fused_checkpoint(checkpoint: Checkpoint, fused: Fused) -> Checkpoint:
    """Return the checkpoint with each fused tensor replaced by its parts, each with its share of rows and elements.

    A tensor whose rows are not those of the blocks stays as it is.
    """
    parts = (_split_saved_tensor(tensor, fused.get(tensor.fqn, ())) for tensor in checkpoint.tensors)
    return dataclasses.replace(checkpoint, tensors=tuple(itertools.chain.from_iterable(parts)))


def _split_saved_tensor(tensor: SavedTensor, whole: Sequence[Block]) -> Iterator[SavedTensor]:
    """Yield the parts of a tensor of a checkpoint; the tensor itself if its rows are not those of the blocks."""
    rows: Counter[str] = Counter()
    for part, size in whole:
        rows[part] += size
    if not tensor.shape or rows.total() != tensor.shape[0]:
        yield tensor
        return
    for part, size in rows.items():
        numbers = tensor.numbers * size // tensor.shape[0]
        yield dataclasses.replace(tensor, fqn=part, shape=(size, *tensor.shape[1:]), numbers=numbers)


def _split_arrays(arrays: Arrays, cuts: FusedSlices) -> Arrays:
    """Return the arrays with fused ones replaced by their parts. By name; others stay as they are."""
    separated: Arrays = {}
    for name, array in arrays.items():
        parts = {part: array[rows] for part, rows in cuts.elements_by_part(name, array).items()}
        separated |= parts or {name: array}
    return separated


def _split_states(states: dict[str, Arrays], cuts: FusedSlices) -> dict[str, Arrays]:
    """Return the optimizer's state by fqn and key, with that of fused tensors replaced by that of their parts.

    Each part gets a copy of the optimizer's counter of steps, which has no dims.
    """
    separated: dict[str, Arrays] = {}
    for name, state in states.items():
        rows_of_parts = next(filter(None, (cuts.elements_by_part(name, array) for array in state.values())), {})
        parts: dict[str, Arrays] = {}
        for part, rows in rows_of_parts.items():
            parts[part] = {key: array[rows] if array.ndim else array for key, array in state.items()}
        separated |= parts or {name: state}
    return separated


def _split_tensor(tensor: TensorEvidence, cuts: FusedSlices) -> Iterator[TensorEvidence]:
    """Yield the parts of a parameter, each with its mesh and placements; the parameter itself if it has no parts.

    The number of a part's rows in the whole parameter follows from the rank's, for all ranks hold the same blocks.
    """
    parts = cuts.elements_by_part(tensor.fqn, tensor.value)
    for name, rows in parts.items():
        value = tensor.value[rows]
        times = tensor.global_shape[0] // len(tensor.value)
        shape = (times * len(value), *tensor.global_shape[1:])
        yield dataclasses.replace(tensor, fqn=name, value=value, global_shape=shape)
    if not parts:
        yield tensor
