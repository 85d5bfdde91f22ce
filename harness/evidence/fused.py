"""Weights that a trainer has fused into one tensor, taken apart: each part under its own name, as if it had been alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np

from harness.evidence.records import RankEvidence, TensorEvidence

Fused = Mapping[str, Mapping[str, int]]
"""By the name of a fused tensor: its parts, one below the other, each with its number of rows."""
Arrays = dict[str, np.ndarray]


def apart(evidence: RankEvidence, fused: Fused) -> RankEvidence:
    """Fused tensors that the rank holds whole. A slice of one is left as it is, for no law knows what is in it."""
    if not fused:
        return evidence
    steps = tuple(
        dataclasses.replace(
            step,
            gradients=_arrays(step.gradients, fused),
            parameters=_arrays(step.parameters, fused),
            optimizer_state=_states(step.optimizer_state, fused),
            changed=None if step.changed is None else _arrays(step.changed, fused),
        )
        for step in evidence.steps
    )
    parameters = tuple(part for tensor in evidence.parameters for part in _tensors(tensor, fused))
    return dataclasses.replace(evidence, steps=steps, parameters=parameters)


def _rows(array: np.ndarray, parts: Mapping[str, int]) -> Iterator[tuple[str, slice]]:
    """Nothing of a tensor that is not all of them."""
    start = 0
    for name, rows in parts.items() if array.ndim and len(array) == sum(parts.values()) else ():
        yield name, slice(start, start + rows)
        start += rows


def _arrays(arrays: Arrays, fused: Fused) -> Arrays:
    found: Arrays = {}
    for name, array in arrays.items():
        found |= {part: array[rows].copy() for part, rows in _rows(array, fused.get(name, {}))} or {name: array}
    return found


def _states(states: dict[str, Arrays], fused: Fused) -> dict[str, Arrays]:
    """An optimizer's counter of steps is each part's."""
    found: dict[str, Arrays] = {}
    for name, state in states.items():
        places = next((cut for array in state.values() if (cut := dict(_rows(array, fused.get(name, {}))))), {})
        parts = {
            part: {key: array[rows].copy() if array.ndim else array for key, array in state.items()}
            for part, rows in places.items()
        }
        found |= parts or {name: state}
    return found


def _tensors(tensor: TensorEvidence, fused: Fused) -> Iterator[TensorEvidence]:
    parts = dict(_rows(tensor.value, fused.get(tensor.fqn, {})))
    for name, rows in parts.items():
        value = tensor.value[rows].copy()
        yield dataclasses.replace(tensor, fqn=name, value=value, global_shape=value.shape)
    if not parts:
        yield tensor
