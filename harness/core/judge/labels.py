"""The labels that a microbatch's loss was computed from, laid as its samples lie.

A trainer may compute its loss in several calls, each from a part of the rows or of the positions. It may leave out the tokens
that do not count, or whole chunks of them. How labels were cut is not recorded: the way that fits best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.core.evidence.step import Microbatch

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
    if labels.size < own.size:
        pieces = np.split(labels, np.cumsum(chunks)[:-1])
        for rows in (own, own.reshape(1, -1)):
            if (laid := _chunks_left_out(pieces, rows)) is not None:
                yield laid.reshape(own.shape)


def _chunks_left_out(pieces: list[np.ndarray], own: np.ndarray) -> np.ndarray | None:
    """Lay right labels of some positions, in order, where whole chunks are missing that do not count; None if they are not so.
    Chunks are as wide as each other, but for one position and for the last one."""
    laid, at = np.full_like(own, IGNORED), 0
    widest = max(piece.size for piece in pieces) // len(own)
    for piece in pieces:
        if piece.size % len(own):
            return None
        chunk = piece.reshape(len(own), -1)
        starts = range(at, own.shape[1] - chunk.shape[1] + 1)
        start = next((one for one in starts if np.array_equal(own[:, one : one + chunk.shape[1]], chunk)), own.shape[1])
        if 0 < start - at < widest - 1:
            return None
        at = start + chunk.shape[1]
        laid[:, start:at] = chunk[:, : own.shape[1] - start]
    return laid if np.array_equal(laid, own) else None


def _spread(labels: np.ndarray, own: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    """Return the labels that count at their places, row and position, one chunk after the other."""
    spread, start = np.full_like(own, IGNORED), 0
    for mask in masks:
        spread[mask] = labels[start : start + mask.sum()]
        start += mask.sum()
    return spread
