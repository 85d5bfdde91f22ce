"""Labels of a loss that was computed in parts, laid as its samples lie."""

from __future__ import annotations

import numpy as np
import pytest

from harness.core.evidence.step import Microbatch
from harness.core.judge.labels import arrange_labels

OWN = np.array([[1, 2, -100, 4], [5, -100, 6, 7]])


def part(labels: list[int], *chunks: int) -> Microbatch:
    return Microbatch(None, np.array(labels), 1.0, 6, chunks)


@pytest.mark.parametrize(
    "seen",
    [
        part([1, 2, -100, 4, 5, -100, 6, 7]),
        part([1, 2, -100, 4, 5, -100, 6, 7], 4, 4),  # a row each
        part([1, 2, -100, 4, 5, -100, 6, 7], 3, 3, 2),  # where it happens to be cut
        part([1, 2, 5, -100, -100, 4, 6, 7], 4, 4),  # two positions of both rows each
        part([1, 2, 4, 5, 6, 7]),  # only those that count
        part([1, 2, 5, 4, 6, 7], 3, 3),  # of two positions each
    ],
    ids=lambda seen: f"{seen.labels.tolist()} in {seen.chunks}",
)
def test_labels_of_a_loss_in_parts_are_put_together_however_they_were_cut(seen: Microbatch) -> None:
    laid = arrange_labels(seen, OWN)
    assert laid is not None and laid.tolist() == OWN.tolist()


def test_a_label_that_is_wrong_stays_wrong() -> None:
    laid = arrange_labels(part([1, 2, 5, -100, -100, 4, 6, 0], 4, 4), OWN)
    assert laid is not None and laid.tolist() == [[1, 2, -100, 4], [5, -100, 6, 0]]


def test_labels_that_are_lost_fit_nowhere() -> None:
    assert arrange_labels(part([1, 2, -100, 4], 2, 2), OWN) is None
    assert arrange_labels(part([1, 2, 4, 5]), OWN) is None


MASKED = np.array([[-100, -100, -100, 4, -100, 6], [-100, -100, 3, -100, -100, 7]])


@pytest.mark.parametrize(
    "seen",
    [
        part([-100, 4, 3, -100, -100, 6, -100, 7], 4, 4),  # two positions of both rows each, without the first two
    ],
    ids=lambda seen: f"{seen.labels.tolist()} in {seen.chunks}",
)
def test_chunks_in_which_no_label_counts_may_be_left_out(seen: Microbatch) -> None:
    laid = arrange_labels(seen, MASKED)
    assert laid is not None and laid.tolist() == MASKED.tolist()


def test_chunks_that_hold_as_many_labels_as_count_in_all_are_no_labels_that_count_alone() -> None:
    own = np.array([[-100, -100, 3, -100], [-100, -100, 4, 5]])
    laid = arrange_labels(part([3, 4, -100, 5], 2, 2), own)
    assert laid is not None and laid.tolist() == own.tolist()
    own = np.array([[-100, -100, 3, -100], [-100, 2, 4, 5]])
    laid = arrange_labels(part([-100, 2, 3, 4, -100, 5], 2, 2, 2), own)
    assert laid is not None and laid.tolist() == own.tolist()


@pytest.mark.parametrize("chunks", [(), (4, 4)])
def test_a_part_that_is_no_whole_chunk_may_not_for_labels_shifted_once_more_lack_one_too(
    chunks: tuple[int, ...],
) -> None:
    assert arrange_labels(part([-100, 4, -100, 6, 3, -100, -100, 7], *chunks), MASKED) is None


def test_a_chunk_in_which_a_label_counts_may_not() -> None:
    assert arrange_labels(part([-100, -100, -100, 4, 3, -100], 6), MASKED) is None
    assert arrange_labels(part([-100, 0, 3, -100, -100, 6, -100, 7], 4, 4), MASKED) is None
