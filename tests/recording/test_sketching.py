"""Sketches of slices add up to the sketch of the whole, and the length of a difference estimates a distance."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import pytest
import torch

from harness.recording.boxes import boxes_of_dims, chunk_of, rows_between, rows_of_interval
from harness.recording.sketches import BUCKETS, Box, boxes_of_text, text_of_boxes
from harness.recording.sketching import Sketcher, alter_by_rounding, columns_of

SHAPES = [(7,), (6, 4), (5, 3, 2), (90, 60), ()]
"""Of one, slices are small and the whole is not: their buckets are looked up in other ways."""


def whole(shape: Sequence[int]) -> tuple[Box, ...]:
    return boxes_of_dims(shape, [((0, size),) for size in shape])


def taken(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    matrix = tensor.reshape(tensor.shape[0] if tensor.dim() else 1, -1)
    rows, columns = ([at for start, stop in of for at in range(start, stop)] for of in (box.rows, box.columns))
    return matrix[rows][:, columns].reshape(-1)


def cuts(shape: Sequence[int]) -> Iterator[list[tuple[Box, ...]]]:
    """Yield the slices of all ranks: cut along each dim, along two, strided, and as FSDP1 cuts vectors."""
    size = math.prod(shape)
    for at in range(len(shape)):
        dims = [[((0, n),)] * 3 for n in shape]
        dims[at] = [chunk_of(((0, shape[at]),), 3, rank, 1) for rank in range(3)]
        yield [boxes_of_dims(shape, [of[rank] for of in dims]) for rank in range(3)]
    if len(shape) > 1:
        both = itertools.product(range(2), range(2))
        yield [
            boxes_of_dims(
                shape,
                [
                    chunk_of(((0, shape[0]),), 2, a, 1),
                    chunk_of(((0, shape[1]),), 2, b, 1),
                    *(((0, n),) for n in shape[2:]),
                ],
            )
            for a, b in both
        ]
        of_tp = [chunk_of(chunk_of(((0, shape[0]),), 2, dp, 2), 2, tp, 1) for dp in range(2) for tp in range(2)]
        yield [boxes_of_dims(shape, [rows, *(((0, n),) for n in shape[1:])]) for rows in of_tp]
    if shape:
        edges = [0, size // 3, size // 2 + 1, size]
        yield [rows_of_interval(shape, start, stop) for start, stop in itertools.pairwise(edges)]


@pytest.mark.parametrize("shape", SHAPES)
def test_sketches_of_slices_add_up_whatever_the_layout(shape: tuple[int, ...]) -> None:
    tensor, sketcher = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), Sketcher()
    full = sketcher.sketch(tensor.reshape(-1), whole(shape))
    assert math.isclose(float(full[0]), float(tensor.square().sum()))
    assert len(full) == 1 + BUCKETS
    for slices in cuts(shape):
        parts = [torch.cat([taken(tensor, box) for box in boxes]) if boxes else torch.empty(0) for boxes in slices]
        assert sum(part.numel() for part in parts) == tensor.numel()
        total = sum(sketcher.sketch(part.double(), boxes) for part, boxes in zip(parts, slices, strict=True))
        assert torch.allclose(torch.as_tensor(total), full, rtol=1e-12, atol=1e-12)


def test_equal_tensors_have_equal_sketches_and_their_transpose_has_another() -> None:
    values = torch.randn((8, 8), dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    one, other, turned = (Sketcher().sketch(of.reshape(-1), whole((8, 8))) for of in (values, values.clone(), values.T))
    assert torch.equal(one, other) and torch.isclose(one[0], turned[0]) and not torch.allclose(one, turned)


@pytest.mark.parametrize("wrong", ["all", "a row", "a column"])
def test_the_length_of_a_difference_estimates_the_distance(wrong: str) -> None:
    draw = torch.Generator().manual_seed(5)
    ratios = []
    for number in range(40):
        off = torch.zeros(96, 80, dtype=torch.float64)
        part = {"all": off, "a row": off[number : number + 1], "a column": off[:, number : number + 1]}[wrong]
        part.normal_(generator=draw)
        squares, *sums = Sketcher().sketch(off.reshape(-1), whole((96, 80))).tolist()
        ratios.append(math.sqrt(sum(one * one for one in sums) / squares))
    assert min(ratios) > 0.4 and max(ratios) < 1.8
    assert 0.9 < sum(ratios) / len(ratios) < 1.1


def test_any_layout_alters_weights_alike() -> None:
    tensor = torch.randn((6, 4), generator=torch.Generator().manual_seed(3))
    full = tensor.clone()
    alter_by_rounding(full.view(-1), "a", whole((6, 4)), columns_of((6, 4)), 2.0**-8)
    assert not torch.equal(full, tensor) and torch.allclose(full, tensor, rtol=2.0**-8)
    for slices in cuts((6, 4)):
        for boxes in slices:
            part = torch.cat([taken(tensor, box) for box in boxes]) if boxes else torch.empty(0)
            alter_by_rounding(part, "a", boxes, 4, 2.0**-8)
            wanted = torch.cat([taken(full, box) for box in boxes]) if boxes else torch.empty(0)
            assert torch.equal(part, wanted)


def test_a_place_in_words_is_read_again() -> None:
    boxes = (Box(((0, 2), (4, 6)), ((1, 3),)), Box(((7, 8),), ((0, 1),)))
    assert boxes_of_text(text_of_boxes(boxes)) == boxes


def test_what_is_kept_of_rows_and_columns_is_bounded() -> None:
    sketcher = Sketcher()
    sketcher.sketch(torch.ones(12), whole((3, 4)))
    sketcher.sketch(torch.ones(12), whole((3, 4)))
    assert sketcher.kept_bytes == 16 * (3 + 4) + 8 * 3 * 4


@pytest.mark.parametrize("shape", SHAPES)
def test_rows_of_slices_add_up_to_those_of_the_whole(shape: tuple[int, ...]) -> None:
    tensor, sketcher = torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), Sketcher()
    size = shape[0] if shape else 1
    for start, stop in ((0, size // 2), (size // 2, size)):
        some, boxes = rows_between(tensor.reshape(-1), whole(shape), start, stop)
        full = sketcher.sketch(torch.cat(some), boxes) if some else torch.zeros(1 + BUCKETS, dtype=torch.float64)
        assert math.isclose(float(full[0]), float(tensor.reshape(size, -1)[start:stop].square().sum()), abs_tol=1e-12)
        for slices in cuts(shape):
            total = torch.zeros(1 + BUCKETS, dtype=torch.float64)
            for of in slices:
                part = torch.cat([taken(tensor, box) for box in of]) if of else torch.empty(0)
                own, where = rows_between(part.double(), of, start, stop)
                total += sketcher.sketch(torch.cat(own), where) if own else 0
            assert torch.allclose(total, full, rtol=1e-12, atol=1e-12)
