"""The sketch of a tensor, computed where it lies and not read: who reads it waits (harness/recording/sketches.py)."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import torch

from harness.recording.digests import CHUNK, mixed, room
from harness.recording.sketches import BUCKETS, Box

WIDEST = 1 << 16
"""Columns that are summed at once."""
KEPT = 1 << 26
"""Bytes of buckets that are kept."""
SMALL = 1 << 12
"""Elements of a slice whose buckets are kept one by one."""


SEEDS = 0x5851F42D4C957F, 0x14057B7EF767814
"""What rows and columns are hashed with, of all parameters alike."""


@functools.lru_cache(maxsize=1 << 14)
def seed(fqn: str) -> int:
    """Return what the noise of a parameter is drawn by."""
    return int.from_bytes(hashlib.sha256(fqn.encode()).digest()[:7], "big")


class Sketcher:
    """Keeps which buckets rows and columns are of, for they are the same in every step."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._small: dict[tuple[Box, ...], torch.Tensor] = {}
        self.kept_bytes = 0
        """Of buckets; at most KEPT."""
        self._fold: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def sketch(self, values: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
        """Return the sum of squares and the sketch of a slice. values: its elements in a row. float64 [1 + BUCKETS]"""
        if values.device.type == "cpu" and 0 < values.numel() <= SMALL:
            each = values.double()
            held = torch.zeros(2 * BUCKETS, dtype=torch.float64).index_add_(0, self._one_by_one(tuple(boxes)), each)
            return torch.cat([torch.dot(each, each).view(1), held[:BUCKETS] - held[BUCKETS:]])
        total = torch.zeros(BUCKETS, BUCKETS, dtype=torch.float64, device=values.device)
        squares = torch.zeros((), dtype=torch.float64, device=values.device)
        begin = 0
        for box in boxes:
            rows, columns = box.size
            matrix = values[begin : begin + rows * columns].view(rows, columns)
            begin += rows * columns
            of_rows = self._buckets(box.rows, 0, values.device)
            of_columns = self._buckets(box.columns, 1, values.device)
            for left in range(0, columns, WIDEST):
                some = slice(left, left + WIDEST)
                squares += _add(total, matrix[:, some], of_rows, tuple(each[some] for each in of_columns))
        folded = torch.zeros(BUCKETS, dtype=torch.float64, device=values.device)
        folded.index_add_(0, self._folding(values.device), total.view(-1))
        return torch.cat([squares.view(1), folded])

    def _one_by_one(self, boxes: tuple[Box, ...]) -> torch.Tensor:
        """Return the bucket of each element of a small slice, BUCKETS more where its sign is negative. int64 [n]"""
        if boxes in self._small:
            return self._small[boxes]
        cpu, found = torch.device("cpu"), []
        for box in boxes:
            (row, its_sign), (column, sign) = (
                self._buckets(of, axis, cpu) for axis, of in enumerate((box.rows, box.columns))
            )
            negative = its_sign[:, None] * sign < 0
            found.append(((row[:, None] + column) % BUCKETS + BUCKETS * negative).view(-1))
        small = torch.cat(found)
        if self._keeps(8 * len(small)):
            self._small[boxes] = small
        return small

    def _keeps(self, size: int) -> bool:
        """Return whether there is room for so many bytes, and take it."""
        fits = self.kept_bytes + size <= KEPT
        self.kept_bytes += size * fits
        return fits

    def _folding(self, device: torch.device) -> torch.Tensor:
        """Return the bucket of each pair of a row's and a column's: their sum, modulo BUCKETS."""
        if device not in self._fold:
            each = torch.arange(BUCKETS, device=device)
            self._fold[device] = ((each[:, None] + each) % BUCKETS).view(-1)
        return self._fold[device]

    def _buckets(
        self, intervals: tuple[tuple[int, int], ...], axis: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bucket and sign of each row or column. int64 [n], float64 [n]"""
        key = (intervals, axis, device)
        if key in self._known:
            return self._known[key]
        hashed = mixed(_numbers(intervals, device) + SEEDS[axis])
        found = hashed & (BUCKETS - 1), (((hashed >> 13) & 1) * 2 - 1).double()
        if self._keeps(16 * len(hashed)):
            self._known[key] = found
        return found


def _numbers(intervals: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in intervals])


def _add(
    total: torch.Tensor,
    matrix: torch.Tensor,
    of_rows: tuple[torch.Tensor, torch.Tensor],
    of_columns: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Add rows up by bucket and sign, then columns. Return the sum of squares. Trap: on a GPU index_add_ adds in any order, so
    that a product with signs is taken there."""
    bucket, sign = of_rows
    rows, columns = matrix.shape
    each, squares = max(1, CHUNK // max(columns, 1)), torch.zeros((), dtype=torch.float64, device=matrix.device)
    on_cpu = matrix.device.type == "cpu"
    held = torch.zeros(2 * BUCKETS if on_cpu else BUCKETS, columns, dtype=torch.float64, device=matrix.device)
    signed = bucket + BUCKETS * (sign < 0) if on_cpu else bucket
    for first in range(0, rows, each):
        some = slice(first, first + each)
        taken = matrix[some]
        part = room(torch.float64, taken).copy_(taken)
        flat = part.view(-1)
        squares += torch.dot(flat, flat)
        if on_cpu:
            held.index_add_(0, signed[some], part)
        else:
            held.addmm_(_signs(bucket[some], sign[some]), part)
    held = held[:BUCKETS] - held[BUCKETS:] if on_cpu else held
    column, its_sign = of_columns
    if on_cpu:
        total.index_add_(1, column, held * its_sign)
    else:
        total.addmm_(held, _signs(column, its_sign).T)
    return squares


def _signs(bucket: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Return the signs, each in the row of its bucket. float64 [BUCKETS, n]"""
    found = torch.zeros(BUCKETS, len(bucket), dtype=torch.float64, device=bucket.device)
    return found.scatter_(0, bucket[None], sign[None])


@torch.no_grad()
def alter(values: torch.Tensor, fqn: str, boxes: Sequence[Box], width: int, relative: float) -> None:
    """Change each element in place by up to this part of it, as a hash of its index in the whole parameter says. width:
    columns of the whole parameter."""
    begin = 0
    for box in boxes:
        rows, columns = (_numbers(of, values.device) for of in (box.rows, box.columns))
        each = max(1, CHUNK // max(len(columns), 1))
        for first in range(0, len(rows), each):
            at = rows[first : first + each, None] * width + columns
            share = (mixed(at + seed(fqn)) >> 11).double() / 2.0**52  # from -1 to 1
            part = values[begin : begin + at.numel()].view(at.shape)
            part.add_((part.double() * share * relative).to(part.dtype))
            begin += at.numel()


def width_of(shape: Sequence[int]) -> int:
    """Return how many columns a parameter has as a matrix of shape[0] rows."""
    return math.prod(shape[1:])
