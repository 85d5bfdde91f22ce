"""Matrices flattened by blocks of columns, one behind the other, as ranks that hold one block each flatten them."""

from __future__ import annotations

import numpy as np


def flatten_by_blocks(matrix: np.ndarray, blocks: int = 1) -> np.ndarray:
    """Return the matrix as a vector, block after block. [rows, columns] -> [rows * columns]

    With one block an array of any dims is flattened as numpy does it.
    """
    if blocks == 1:
        return matrix.ravel()
    return np.concatenate([block.ravel() for block in np.split(matrix, blocks, axis=1)])


def restore_from_blocks(vector: np.ndarray, shape: tuple[int, ...], blocks: int = 1) -> np.ndarray:
    """Return the matrix of this shape from its vector, block after block: the inverse of flatten_by_blocks.

    With one block the vector may be an array of any dims.
    """
    if blocks == 1:
        return vector.reshape(shape)
    rows, columns = shape
    return vector.reshape(blocks, rows, columns // blocks).transpose(1, 0, 2).reshape(shape)
