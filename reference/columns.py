"""Vectors in which a matrix lies by blocks of columns, one behind the other, as ranks that have these flatten each its own."""

from __future__ import annotations

import numpy as np


def flattened(matrix: np.ndarray, blocks: int = 1) -> np.ndarray:
    """[rows, columns] -> [rows * columns]; of one block, whatever its dims are, as numpy flattens it."""
    return (
        matrix.ravel() if blocks == 1 else np.concatenate([part.ravel() for part in np.split(matrix, blocks, axis=1)])
    )


def restored(vector: np.ndarray, shape: tuple[int, ...], blocks: int = 1) -> np.ndarray:
    """The matrix of this shape that was flattened so."""
    if blocks == 1:
        return vector.reshape(shape)
    rows, columns = shape
    return vector.reshape(blocks, rows, columns // blocks).transpose(1, 0, 2).reshape(shape)
