"""Muon's rule for one matrix, as in torch.optim.Muon; but Newton-Schulz runs in the matrix's own dtype, not in bfloat16.

    average <- momentum * average + (1 - momentum) * gradient
    turned  <- newton_schulz(with nesterov: momentum * average + (1 - momentum) * gradient; else the average)
    weight  <- (1 - lr * weight_decay) * weight - lr * scale * turned

turned has about the singular vectors of its argument, and singular values near 1. So it is a function of the whole
matrix: slices that are turned one by one are no slices of it. The functions take tensors and numpy's arrays alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of the odd polynomial that is applied to the singular values, by Keller Jordan."""
STEPS = 5
"""How often the polynomial is applied."""
SMALLEST_LENGTH = 1e-7
"""The least number by which the matrix is divided."""
STEEPEST_SLOPE = COEFFICIENTS[0] ** STEPS
"""Slope at 0 of the polynomial applied STEPS times, where it is steepest: the factor by which it may magnify an error."""


def newton_schulz(matrix: Any) -> Any:
    """Return the matrix with its singular values moved towards 1. [m, n] -> [m, n]"""
    a, b, c = COEFFICIENTS
    tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if tall else matrix
    x = x / max(float((x * x).sum()) ** 0.5, SMALLEST_LENGTH)
    for _ in range(STEPS):
        gram = x @ x.T
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.T if tall else x


def matrix_to_orthogonalise(average: Any, gradient: Any, *, momentum: float, nesterov: bool) -> Any:
    """Return the matrix that is orthogonalised: `average` or, with nesterov, its mean with the gradient, weighted by
    momentum.

    average: of gradients, with this gradient in it already.
    """
    if nesterov:
        return momentum * average + (1 - momentum) * gradient
    return average


def learning_rate_factor(shape: Sequence[int], adjust_lr: str) -> float:
    """Return the factor of the learning rate for a matrix of this shape, so that updates of all shapes have equal entries.

    "original": Keller Jordan's; "match_rms_adamw": Moonshot's, whose updates are as large as AdamW's at the same rate.
    """
    rows, columns = shape
    return math.sqrt(max(1, rows / columns)) if adjust_lr == "original" else 0.2 * math.sqrt(max(rows, columns))
