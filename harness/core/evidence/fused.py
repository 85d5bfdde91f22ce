"""Weights that a trainer has fused into one tensor, separated: each part under its own name, as if it had been alone.

A part is one block of the fused tensor's rows (wq, wk, wv), or several. There may be one for each group of heads (wq, wk, wv,
wq, wk, wv, ..), or one for each tensor-parallel rank (w1, w3, w1, w3). A rank that holds every n-th part of the rows holds an
n-th of the fused tensor's blocks, whole. They are the same parts in the same order on every rank.
"""

from __future__ import annotations

import dataclasses
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


def blocks(parts: Sequence[str], rows: Mapping[str, int]) -> tuple[Block, ...]:
    """Return the blocks of a fused tensor whose parts lie in this order. rows: of each part; n times means n equal blocks."""
    return tuple((part, rows[part] // parts.count(part)) for part in parts)


def held_blocks(whole: Sequence[Block], length: int) -> Sequence[Block]:
    """Return the blocks of a rank with this many rows; none unless the rows are cut between alike blocks."""
    rows = sum(size for _, size in whole)
    degree = rows // length if length and rows % length == 0 else 0
    held = whole[: len(whole) // degree] if degree and len(whole) % degree == 0 else ()
    return held if list(held) * degree == list(whole) else ()


def places(held: Sequence[Block]) -> dict[str, np.ndarray]:
    """Return each part's rows (or elements) of the fused tensor, in the part's own order. int64"""
    found: dict[str, list[np.ndarray]] = {}
    start = 0
    for part, size in held:
        found.setdefault(part, []).append(np.arange(start, start + size))
        start += size
    return {part: np.concatenate(rows) for part, rows in found.items()}


@dataclass(frozen=True)
class Cuts:
    """Where the parts of fused tensors lie in what a rank has of these. shapes: of what it has whole. starts: of a tensor of
    whose gradient and optimizer state it has an interval, at which element that begins."""

    fused: Fused
    shapes: Mapping[str, tuple[int, ...]]
    starts: Mapping[str, int]

    def of(self, name: str, array: np.ndarray) -> dict[str, np.ndarray]:
        """Return each part's rows, or its elements in an interval of the flattened tensor. int64. Empty: left as it is."""
        whole = self.fused.get(name, ())
        if not whole or not array.ndim:
            return {}
        if array.ndim > 1 or name not in self.starts:
            return places(held_blocks(whole, len(array)))
        (rows, *columns), start = self.shapes[name], self.starts[name]
        held = [(part, size * math.prod(columns)) for part, size in held_blocks(whole, rows)]
        inside = {part: at[(at >= start) & (at < start + len(array))] - start for part, at in places(held).items()}
        return {part: at for part, at in inside.items() if at.size}


def apart(evidence: RankEvidence, fused: Fused, starts: Mapping[str, int] = MappingProxyType({})) -> RankEvidence:
    """Separate fused tensors of which the rank holds whole blocks, and intervals whose starts are given. Any other slice is
    left as it is, for no check covers what is in it."""
    if not fused:
        return evidence
    cuts = Cuts(fused, {tensor.fqn: tensor.value.shape for tensor in evidence.parameters}, starts)
    steps = tuple(
        dataclasses.replace(
            step,
            gradients=_arrays(step.gradients, cuts),
            parameters=_arrays(step.parameters, cuts),
            optimizer_state=_states(step.optimizer_state, cuts),
            changed=None if step.changed is None else _arrays(step.changed, cuts),
        )
        for step in evidence.steps
    )
    parameters = tuple(part for tensor in evidence.parameters for part in _tensors(tensor, cuts))
    resumed = evidence.resumed and Resumed(
        _arrays(evidence.resumed.parameters, cuts), _states(evidence.resumed.optimizer_state, cuts)
    )
    return dataclasses.replace(evidence, steps=steps, parameters=parameters, resumed=resumed)


def saved_apart(checkpoint: Checkpoint, fused: Fused) -> Checkpoint:
    """A tensor about a fused one is about each of its parts, with their shares of its rows."""
    tensors = tuple(part for tensor in checkpoint.tensors for part in _saved(tensor, fused.get(tensor.fqn, ())))
    return dataclasses.replace(checkpoint, tensors=tensors)


def _saved(tensor: SavedTensor, whole: Sequence[Block]) -> Iterator[SavedTensor]:
    rows: Counter[str] = Counter()
    for part, size in whole:
        rows[part] += size
    if not tensor.shape or rows.total() != tensor.shape[0]:
        yield tensor
        return
    for part, size in rows.items():
        numbers = tensor.numbers * size // tensor.shape[0]
        yield dataclasses.replace(tensor, fqn=part, shape=(size, *tensor.shape[1:]), numbers=numbers)


def _arrays(arrays: Arrays, cuts: Cuts) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        found |= {part: array[at] for part, at in cuts.of(name, array).items()} or {name: array}
    return found


def _states(states: dict[str, Arrays], cuts: Cuts) -> dict[str, Arrays]:
    """An optimizer's counter of steps is each part's."""
    found: dict[str, Arrays] = {}
    for name, state in states.items():
        cut = next((cut for array in state.values() if (cut := cuts.of(name, array))), {})
        parts = {
            part: {key: array[at] if array.ndim else array for key, array in state.items()} for part, at in cut.items()
        }
        found |= parts or {name: state}
    return found


def _tensors(tensor: TensorEvidence, cuts: Cuts) -> Iterator[TensorEvidence]:
    """What is claimed of the fused tensor is claimed of each part."""
    parts = cuts.of(tensor.fqn, tensor.value)
    for name, rows in parts.items():
        value = tensor.value[rows]
        times = tensor.global_shape[0] // len(tensor.value)
        shape = (times * len(value), *tensor.global_shape[1:])
        yield dataclasses.replace(tensor, fqn=name, value=value, global_shape=shape)
    if not parts:
        yield tensor
