"""Search for the slice of a whole parameter whose bytes a rank holds, and rounding to coarser formats."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from harness.core.plan.slices import Slice, numel


def find_slice(value: np.ndarray, full: np.ndarray, guess: Slice | None = None) -> Slice | None:
    """Return the first slice of `full` that has the shape, dtype and bytes of `value`; `guess` is tried first.

    None if there is none. An empty value has no bytes to find: its slice is an empty `guess`, else the intervals from 0
    of its shape. None as well if the number of dims differs.
    """
    if value.ndim != full.ndim:
        return None
    if value.size == 0:
        if guess is not None and numel(guess) == 0:
            return guess
        return tuple((0, size) for size in value.shape)
    for corner in _candidate_corners(value, full, guess):
        candidate = _slice_from_corner(corner, value.shape)
        if is_equal_at(value, full, candidate):
            return candidate
    return None


def _candidate_corners(value: np.ndarray, full: np.ndarray, guess: Slice | None) -> Iterator[Iterable[int]]:
    """Yield the indices of `full` where the value may begin: the guess, then entries equal to its first one."""
    if guess is not None:
        yield [start for start, _ in guess]
    yield from np.argwhere(full == value.flat[0])


def _slice_from_corner(corner: Iterable[int], shape: tuple[int, ...]) -> Slice:
    """Return the slice of this shape that begins at an index. It may reach beyond the whole parameter."""
    return tuple((int(start), int(start) + size) for start, size in zip(corner, shape, strict=True))


def is_equal_at(value: np.ndarray, full: np.ndarray, candidate: Slice) -> bool:
    """Return whether the value's shape, dtype and bytes are those of this slice of `full`."""
    region = view_of_slice(full, candidate)
    return region.shape == value.shape and region.dtype == value.dtype and region.tobytes() == value.tobytes()


def view_of_slice(full: np.ndarray, part: Slice) -> np.ndarray:
    """Return a view of the slice `part` of a whole parameter."""
    return full[tuple(slice(start, stop) for start, stop in part)]


# ---- coarser formats


def to_bfloat16(value: np.ndarray) -> np.ndarray:
    """Return the values rounded to bfloat16, as float32: to the nearest, to even in a tie."""
    bits = value.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000).view(np.float32)


ROUNDED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "float32": lambda value: value.astype(np.float32),
    "bfloat16": to_bfloat16,
    "float16": lambda value: np.clip(value, -65504, 65504).astype(np.float16),
}
"""Dtype -> function that rounds values to it. bfloat16 is returned as float32; float16 is clipped to its range."""
