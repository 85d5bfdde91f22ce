"""Rows put together from what ranks received, and the labels that lie beside them. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import fsdp_4
from literal import ADAMW, tiny_case, trial_of, with_step

from harness.diagnosis import received as received_module
from harness.diagnosis.received import Rows, received, shift_of, trained_on
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

ONE_TOKEN = np.full((2, 8), 3)
ROW = np.arange(16).reshape(2, 8)


def with_labels(trial: Trial, rank: int, labels: np.ndarray | None) -> Trial:
    """In its only microbatch of step 1."""
    (part,) = trial.ranks[rank].steps[0].microbatches
    return with_step(trial, rank, 1, microbatches=(replace(part, labels=labels),))


@pytest.mark.parametrize(("by", "told"), [(0, 0), (1, 1), (-1, -1), (4, 4), (-4, -4), (5, None)])
def test_labels_are_those_of_as_many_places_later_up_to_four(by: int, told: int | None) -> None:
    longer = np.arange(12 * 2).reshape(2, 12)
    assert shift_of(np.roll(longer, -by, axis=1), longer) == told


def test_of_labels_that_fit_at_several_places_the_nearest_counts() -> None:
    assert shift_of(ONE_TOKEN, ONE_TOKEN) == 0


def test_too_few_labels_to_tell_are_at_no_place() -> None:
    assert shift_of(ROW[:, :3], ROW) is None
    assert shift_of(ROW[:, :4], ROW) == 0


def test_rows_are_whole_only_if_each_token_has_its_label_on_every_rank() -> None:
    right = fsdp_4()
    rows = received(right, 1)
    assert rows is not None and rows.whole
    (part,) = right.ranks[2].steps[0].microbatches
    assert part.labels is not None
    shorter = received(with_labels(right, 2, part.labels[:, :-1]), 1)
    assert shorter is not None and not shorter.whole


def test_where_nobody_saw_labels_those_of_the_samples_are_taken() -> None:
    right = fsdp_4()
    unseen, rows = received(with_labels(right, 2, None), 1), received(right, 1)
    assert unseen is not None and rows is not None and unseen.whole
    assert np.array_equal(unseen.labels, rows.labels)


def test_cp_ranks_that_receive_different_numbers_of_rows_make_up_none() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16)))
    rows, right = received(trial, 1), trial.ranks[1].steps[0].microbatches[0]
    assert rows is not None and rows.tokens.shape == (8, 16)
    fewer = replace(right, tokens=right.tokens[:-1], labels=None)
    assert received(with_step(trial, 1, 1, microbatches=(fewer,)), 1) is None


def test_a_part_of_a_sample_is_known_as_it_and_a_row_of_none_is_a_sample_of_its_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial = fsdp_4()
    monkeypatch.setattr(received_module, "another_reference", lambda trial, **_: trial)
    tokens, labels = trial.reference.tokens[:2, :2].copy(), trial.reference.labels[:2, :2]
    assert len(trained_on(trial, {1: Rows(tokens, labels)}).reference.tokens) == len(trial.reference.tokens)
    tokens[1] = 99
    changed = trained_on(trial, {1: Rows(tokens, labels)}).reference
    assert len(changed.tokens) == len(trial.reference.tokens) + 1 == len({*changed.sample_ids})
    assert changed.tokens[-1, :2].tolist() == [99, 99]
