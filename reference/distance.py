"""Distance of an array from another of the same shape: of whole arrays, and the best-fitting factor. Sums are in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def relative_distance(seen: np.ndarray, expected: np.ndarray) -> float:
    """Return ||seen - expected|| / ||expected||, the root mean square of the difference over that of the expected array.

    If all that is expected is zero: 0 if the same is seen, else inf.
    """
    seen = seen.astype(np.float64)
    expected = expected.astype(np.float64)
    length = _length(expected)
    if not length:
        return math.inf if np.any(seen != expected) else 0.0
    return _length(seen - expected) / length


def _length(values: np.ndarray) -> float:
    """Return the 2-norm. BLAS is not used, for its threads wait for each other for longer than this takes."""
    return math.sqrt(float(np.sum(np.square(values))))


def best_fitting_factor(seen: np.ndarray, expected: np.ndarray) -> float:
    """Return the factor of `expected` that is nearest to `seen`: <seen, expected> / <expected, expected>.

    1 if all that is expected is zero: only the distance shows a difference then.
    """
    seen = seen.astype(np.float64)
    expected = expected.astype(np.float64)
    square = float(np.sum(expected * expected))
    return float(np.sum(seen * expected)) / square if square else 1.0


def largest_or_nan(distances: Sequence[float]) -> float:
    """Return the largest distance, NaN if any is NaN. Python's max may pass over a NaN."""
    return float(np.max(np.array(distances)))
