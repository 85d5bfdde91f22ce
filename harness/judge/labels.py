"""The labels that a microbatch's loss was computed from, laid as its samples lie.

A trainer may compute its loss in several calls, each from a part of the rows or of the positions. It may leave out the tokens
that do not count. How labels were cut is not recorded: the way that fits best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.evidence.step import Microbatch

IGNORED = -100
"""The label of a token that does not count."""


def laid_out(part: Microbatch, own: np.ndarray) -> np.ndarray | None:
    """[samples, positions], like `own`, the samples' own labels; None where there are more or fewer."""
    assert part.labels is not None
    ways = list(_ways(part.labels.reshape(-1), part.chunks, own))
    return min(ways, key=lambda labels: int((labels != own).sum())) if ways else None


def _ways(labels: np.ndarray, chunks: tuple[int, ...], own: np.ndarray) -> Iterator[np.ndarray]:
    samples = len(own)
    if labels.size == own.size:
        yield labels.reshape(own.shape)
        if chunks and all(size % samples == 0 for size in chunks):
            yield np.hstack([chunk.reshape(samples, -1) for chunk in np.split(labels, np.cumsum(chunks)[:-1])])
    elif labels.size == (own != IGNORED).sum():
        yield _spread(labels, own, [own != IGNORED])
        columns = np.array_split(np.arange(own.shape[1]), max(len(chunks), 1))
        yield _spread(labels, own, [(own != IGNORED) & np.isin(np.arange(own.shape[1]), at) for at in columns])


def _spread(labels: np.ndarray, own: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    """Return the labels that count at their places, row and position, one chunk after the other."""
    spread, start = np.full_like(own, IGNORED), 0
    for mask in masks:
        spread[mask] = labels[start : start + mask.sum()]
        start += mask.sum()
    return spread
