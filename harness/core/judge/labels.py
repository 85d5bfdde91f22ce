"""The labels that a microbatch's loss was computed from, arranged as its samples are.

A trainer may compute its loss in several calls, each from a part of the rows or of the positions. It may leave out the
tokens that do not count, or whole chunks of them. How labels were cut is not recorded: the way that fits best is taken.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.core.evidence.step import Microbatch

IGNORED = -100
"""The label of a token that does not count."""


def arrange_labels(part: Microbatch, own: np.ndarray) -> np.ndarray | None:
    """Return a microbatch's labels [samples, positions] in the arrangement that agrees best with the samples' own.

    None if no arrangement has a fitting size. The microbatch must have labels. own: the labels that the samples should
    have.
    """
    assert part.labels is not None
    candidates = list(_possible_arrangements(part.labels.reshape(-1), part.chunks, own))
    return min(candidates, key=lambda labels: int((labels != own).sum())) if candidates else None


def _possible_arrangements(labels: np.ndarray, chunks: tuple[int, ...], own: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the labels in the shape of `own`, once for each way in which a trainer may have cut them.

    Nothing if none fits. chunks: number of labels of each call of the loss, in order; empty for a single call.
    """
    samples = len(own)
    if labels.size == own.size:
        yield labels.reshape(own.shape)
        if chunks and all(size % samples == 0 for size in chunks):
            yield np.hstack([chunk.reshape(samples, -1) for chunk in np.split(labels, np.cumsum(chunks)[:-1])])
    elif labels.size == (own != IGNORED).sum():
        yield _arrange_by_masks(labels, own, [own != IGNORED])
        columns = np.array_split(np.arange(own.shape[1]), max(len(chunks), 1))
        masks = [(own != IGNORED) & np.isin(np.arange(own.shape[1]), positions) for positions in columns]
        yield _arrange_by_masks(labels, own, masks)
    if labels.size < own.size:
        pieces = np.split(labels, np.cumsum(chunks)[:-1])
        for rows in (own, own.reshape(1, -1)):
            if (laid := _arrange_without_chunks(pieces, rows)) is not None:
                yield laid.reshape(own.shape)


def _arrange_without_chunks(pieces: list[np.ndarray], own: np.ndarray) -> np.ndarray | None:
    """Return the labels in the shape of `own`, where whole chunks without a valid label are missing. These are IGNORED.

    None if the result is not equal to `own`. All chunks have the same width, but for one position and for the last
    chunk. pieces: the labels of each call of the loss.
    """
    rows, positions = own.shape
    laid = np.full_like(own, IGNORED)
    end = 0
    widest = max(piece.size for piece in pieces) // rows
    for piece in pieces:
        if piece.size % rows:
            return None
        chunk = piece.reshape(rows, -1)
        width = chunk.shape[1]
        starts = range(end, positions - width + 1)
        matching_starts = (start for start in starts if np.array_equal(own[:, start : start + width], chunk))
        start = next(matching_starts, positions)
        if 0 < start - end < widest - 1:
            return None
        end = start + width
        laid[:, start:end] = chunk[:, : positions - start]
    return laid if np.array_equal(laid, own) else None


def _arrange_by_masks(labels: np.ndarray, own: np.ndarray, masks: list[np.ndarray]) -> np.ndarray:
    """Return labels in the shape of `own`: each mask in turn takes the next labels, row by row. IGNORED elsewhere."""
    spread = np.full_like(own, IGNORED)
    start = 0
    for mask in masks:
        spread[mask] = labels[start : start + mask.sum()]
        start += mask.sum()
    return spread
