"""Sketches of tensors, computed on the device where they lie and not read: who reads one waits
(harness/recording/sketches.py)."""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence

import torch

from harness.recording.digests import CHUNK, hash_numbers, reused_buffer
from harness.recording.sketches import BUCKETS, Box

WIDEST_COLUMNS = 1 << 16
"""Columns that are summed at once."""
MOST_KEPT_BYTES = 1 << 26
"""Bytes of buckets that are kept."""
SMALL_SLICE = 1 << 12
"""Elements of a slice whose buckets are kept one by one."""


AXIS_SEEDS = 0x5851F42D4C957F, 0x14057B7EF767814
"""What rows and columns are hashed with, of all parameters alike."""


@functools.lru_cache(maxsize=1 << 14)
def noise_seed(fqn: str) -> int:
    """Return the seed by which the noise of a parameter is drawn: a number of 56 bits from its fqn."""
    return int.from_bytes(hashlib.sha256(fqn.encode()).digest()[:7], "big")


class Sketcher:
    """Maker of sketches. It keeps the buckets of rows and columns, up to MOST_KEPT_BYTES, for they are the same in
    every step.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        self._small: dict[tuple[Box, ...], torch.Tensor] = {}
        self.kept_bytes = 0
        """Of buckets; at most MOST_KEPT_BYTES."""
        self._fold: dict[torch.device, torch.Tensor] = {}

    @torch.no_grad()
    def sketch(self, values: torch.Tensor, boxes: Sequence[Box]) -> torch.Tensor:
        """Return the sum of squares of a slice, and then its sketch, on the slice's device. float64 [1 + BUCKETS]

        values: its elements in a row, in the order of the boxes.
        """
        if values.device.type == "cpu" and 0 < values.numel() <= SMALL_SLICE:
            doubles = values.double()
            bucket_sums = torch.zeros(2 * BUCKETS, dtype=torch.float64).index_add_(
                0, self._small_slice_buckets(tuple(boxes)), doubles
            )
            return torch.cat([torch.dot(doubles, doubles).view(1), bucket_sums[:BUCKETS] - bucket_sums[BUCKETS:]])
        total = torch.zeros(BUCKETS, BUCKETS, dtype=torch.float64, device=values.device)
        squares = torch.zeros((), dtype=torch.float64, device=values.device)
        begin = 0
        for box in boxes:
            rows, columns = box.size
            matrix = values[begin : begin + rows * columns].view(rows, columns)
            begin += rows * columns
            of_rows = self._buckets(box.rows, 0, values.device)
            of_columns = self._buckets(box.columns, 1, values.device)
            for first_column in range(0, columns, WIDEST_COLUMNS):
                column_slice = slice(first_column, first_column + WIDEST_COLUMNS)
                squares += _add_to_buckets(
                    total,
                    matrix[:, column_slice],
                    of_rows,
                    tuple(column_part[column_slice] for column_part in of_columns),
                )
        folded = torch.zeros(BUCKETS, dtype=torch.float64, device=values.device)
        folded.index_add_(0, self._folding_buckets(values.device), total.view(-1))
        return torch.cat([squares.view(1), folded])

    def _small_slice_buckets(self, boxes: tuple[Box, ...]) -> torch.Tensor:
        """Return the bucket of each element of a small slice, BUCKETS more where its sign is negative. int64 [n]"""
        if boxes in self._small:
            return self._small[boxes]
        cpu = torch.device("cpu")
        bucket_parts = []
        for box in boxes:
            row_bucket, row_sign = self._buckets(box.rows, 0, cpu)
            column_bucket, column_sign = self._buckets(box.columns, 1, cpu)
            is_negative = row_sign[:, None] * column_sign < 0
            bucket_parts.append(((row_bucket[:, None] + column_bucket) % BUCKETS + BUCKETS * is_negative).view(-1))
        small = torch.cat(bucket_parts)
        if self._reserve(8 * len(small)):
            self._small[boxes] = small
        return small

    def _reserve(self, size: int) -> bool:
        """Return whether there is room for so many more bytes of kept buckets, and take it if there is."""
        fits = self.kept_bytes + size <= MOST_KEPT_BYTES
        if fits:
            self.kept_bytes += size
        return fits

    def _folding_buckets(self, device: torch.device) -> torch.Tensor:
        """Return the bucket of each pair of a row's bucket and a column's: their sum, modulo BUCKETS. int64 [BUCKETS
        * BUCKETS]"""
        if device not in self._fold:
            bucket = torch.arange(BUCKETS, device=device)
            self._fold[device] = ((bucket[:, None] + bucket) % BUCKETS).view(-1)
        return self._fold[device]

    def _buckets(
        self, intervals: tuple[tuple[int, int], ...], axis: int, device: torch.device
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return bucket and sign of each row (axis 0) or column (axis 1) of these intervals. int64 [n], float64 [n]"""
        key = (intervals, axis, device)
        if key in self._known:
            return self._known[key]
        hashed = hash_numbers(_index_numbers(intervals, device) + AXIS_SEEDS[axis])
        buckets_and_signs = hashed & (BUCKETS - 1), (((hashed >> 13) & 1) * 2 - 1).double()
        if self._reserve(16 * len(hashed)):
            self._known[key] = buckets_and_signs
        return buckets_and_signs


def _index_numbers(intervals: Sequence[tuple[int, int]], device: torch.device) -> torch.Tensor:
    """Return all indices of these half-open intervals, in order. int64 [n]"""
    return torch.cat([torch.arange(start, stop, device=device) for start, stop in intervals])


def _add_to_buckets(
    total: torch.Tensor,
    matrix: torch.Tensor,
    of_rows: tuple[torch.Tensor, torch.Tensor],
    of_columns: tuple[torch.Tensor, ...],
) -> torch.Tensor:
    """Add a matrix to the buckets of `total`, by bucket and sign of rows and columns.

    Return its sum of squares, float64 []. Trap: on a GPU index_add_ adds in any order, so that a product with signs is
    taken there.
    """
    bucket, sign = of_rows
    rows, columns = matrix.shape
    rows_at_once = max(1, CHUNK // max(columns, 1))
    squares = torch.zeros((), dtype=torch.float64, device=matrix.device)
    on_cpu = matrix.device.type == "cpu"
    bucket_sums = torch.zeros(2 * BUCKETS if on_cpu else BUCKETS, columns, dtype=torch.float64, device=matrix.device)
    signed = bucket + BUCKETS * (sign < 0) if on_cpu else bucket
    for first in range(0, rows, rows_at_once):
        row_slice = slice(first, first + rows_at_once)
        taken_rows = matrix[row_slice]
        part = reused_buffer(torch.float64, taken_rows).copy_(taken_rows)
        flat = part.view(-1)
        squares += torch.dot(flat, flat)
        if on_cpu:
            bucket_sums.index_add_(0, signed[row_slice], part)
        else:
            bucket_sums.addmm_(_sign_matrix(bucket[row_slice], sign[row_slice]), part)
    bucket_sums = bucket_sums[:BUCKETS] - bucket_sums[BUCKETS:] if on_cpu else bucket_sums
    column_bucket, column_sign = of_columns
    if on_cpu:
        total.index_add_(1, column_bucket, bucket_sums * column_sign)
    else:
        total.addmm_(bucket_sums, _sign_matrix(column_bucket, column_sign).T)
    return squares


def _sign_matrix(bucket: torch.Tensor, sign: torch.Tensor) -> torch.Tensor:
    """Return the signs, each in the row of its bucket. float64 [BUCKETS, n]"""
    signs = torch.zeros(BUCKETS, len(bucket), dtype=torch.float64, device=bucket.device)
    return signs.scatter_(0, bucket[None], sign[None])


@torch.no_grad()
def alter_by_rounding(values: torch.Tensor, fqn: str, boxes: Sequence[Box], width: int, relative: float) -> None:
    """Change each element of a slice in place, by at most the part `relative` of it.

    A hash of its index in the whole parameter gives the part, so every layout has the same noise. values: the slice's
    elements, in a row. width: columns of the whole parameter.
    """
    begin = 0
    for box in boxes:
        rows, columns = (_index_numbers(intervals, values.device) for intervals in (box.rows, box.columns))
        rows_at_once = max(1, CHUNK // max(len(columns), 1))
        for first in range(0, len(rows), rows_at_once):
            indices = rows[first : first + rows_at_once, None] * width + columns
            share = (hash_numbers(indices + noise_seed(fqn)) >> 11).double() / 2.0**52  # from -1 to 1
            part = values[begin : begin + indices.numel()].view(indices.shape)
            part.add_((part.double() * share * relative).to(part.dtype))
            begin += indices.numel()


def columns_of(shape: Sequence[int]) -> int:
    """Return how many columns a parameter has as a matrix of shape[0] rows; 1 for a vector or a scalar."""
    return math.prod(shape[1:])
