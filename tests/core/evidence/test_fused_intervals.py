"""Intervals of tensors that a trainer has fused become intervals of their parts."""

from __future__ import annotations

import numpy as np

from harness.core.evidence.fused import FusedSlices

FUSED = {"wqkv": (("wq", 2), ("wk", 1), ("wq", 2), ("wk", 1))}
"""Two groups of heads; of two columns, the flattened tensor has wq at 0 to 3 and 6 to 9, wk at 4, 5, 10 and 11."""


def cut(start: int, length: int) -> dict[str, list[int]]:
    """By part, which elements of an interval are its own."""
    found = FusedSlices(FUSED, {"wqkv": (6, 2)}, {"wqkv": start}).elements_by_part("wqkv", np.arange(length))
    return {part: at.tolist() for part, at in found.items()}


def test_an_interval_is_cut_where_the_parts_of_the_whole_meet() -> None:
    assert cut(0, 12) == {"wq": [0, 1, 2, 3, 6, 7, 8, 9], "wk": [4, 5, 10, 11]}
    assert cut(3, 5) == {"wq": [0, 3, 4], "wk": [1, 2]}


def test_of_a_part_that_an_interval_does_not_touch_there_is_nothing() -> None:
    assert cut(6, 3) == {"wq": [0, 1, 2]}


def test_a_whole_tensor_is_cut_by_rows_also_where_intervals_of_it_are_told() -> None:
    found = FusedSlices(FUSED, {"wqkv": (6, 2)}, {"wqkv": 3}).elements_by_part("wqkv", np.zeros((6, 2)))
    assert {part: at.tolist() for part, at in found.items()} == {"wq": [0, 1, 3, 4], "wk": [2, 5]}


def test_an_interval_of_which_nobody_says_where_it_begins_is_left_as_it_is() -> None:
    assert FusedSlices(FUSED, {"wqkv": (6, 2)}, {}).elements_by_part("wqkv", np.arange(5)) == {}
