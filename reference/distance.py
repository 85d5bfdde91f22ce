"""How far one array lies from another of the same shape: as a whole, and by what factor. Sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def relative_distance(seen: np.ndarray, expected: np.ndarray) -> float:
    """||seen - expected|| / ||expected||, which is the root mean square of one over that of the other."""
    seen, expected = seen.astype(np.float64), expected.astype(np.float64)
    length = _length(expected)
    if not length:
        return math.inf if np.any(seen != expected) else 0.0
    return _length(seen - expected) / length


def _length(values: np.ndarray) -> float:
    """Return the length without BLAS, whose threads wait for each other for longer than this takes."""
    return math.sqrt(float(np.sum(np.square(values))))


def best_fit(seen: np.ndarray, expected: np.ndarray) -> float:
    """The factor that brings what is expected nearest to what is seen: <seen, expected> / <expected, expected>.

    1 where nothing but zeros is expected: only the distance shows a difference then.
    """
    seen, expected = seen.astype(np.float64), expected.astype(np.float64)
    square = float(np.sum(expected * expected))
    return float(np.sum(seen * expected)) / square if square else 1.0


def largest_of(distances: Sequence[float]) -> float:
    """NaN if any is NaN, which Python's max passes over once it has met a number."""
    return float(np.max(np.array(distances)))
