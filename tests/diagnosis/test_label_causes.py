"""Labels that are not the samples', told by what those that are wrong have in common. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import dims
from literal import ADAMW, tiny_case, trial_of, with_step

from harness.diagnosis.labels import mismatched_labels
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

LONG = trial_of(tiny_case(dims(shard=4), replace(ADAMW, seq_len=16)))


def relabelled(change: Callable[[np.ndarray], np.ndarray], trial: Trial = LONG) -> Trial:
    """What every rank's loss was computed from in step 1, by the labels that it should have been."""
    for rank, evidence in trial.ranks.items():
        parts = tuple(replace(part, labels=change(part.labels.copy())) for part in evidence.steps[0].microbatches)
        trial = with_step(trial, rank, 1, microbatches=parts)
    return trial


def said(change: Callable[[np.ndarray], np.ndarray], trial: Trial = LONG) -> str:
    found = mismatched_labels(relabelled(change, trial), 1)
    return found.text if found else ""


@pytest.mark.parametrize(
    ("by", "told"),
    [
        (-1, "labels are not shifted: each token predicts itself"),
        (1, "labels are shifted by 1 more: each token predicts the token after the next"),
        (2, "labels are shifted by 2 more: each token predicts the token 2 places further"),
        (-2, "labels are shifted by -2 more: each token predicts the token 2 places back"),
    ],
)
def test_labels_of_other_tokens_are_told_by_the_place_of_these(by: int, told: str) -> None:
    def shifted(labels: np.ndarray) -> np.ndarray:
        moved = np.full_like(labels, -100)
        first, last = max(0, -by), labels.shape[1] - max(0, by)
        moved[:, first:last] = labels[:, first + by : last + by]
        return moved

    assert said(shifted) == told


def masking(where: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda labels: np.where(where(labels), -100, labels)


def at(*places: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda labels: np.isin(np.arange(labels.shape[1]), places) & np.ones_like(labels, bool)


@pytest.mark.parametrize(
    ("where", "which"),
    [
        (lambda labels: labels == 3, "all of them are token 3, masked"),
        (lambda labels: labels >= 4, "all from token 4 on are masked"),
        (at(15), "the last of each row is masked"),
        (at(0), "the first of each row is masked"),
        (at(5), "those at position 5 are masked"),
        (at(5, 6, 7), "those at positions 5-7 are masked"),
    ],
)
def test_labels_that_are_masked_are_told_by_what_they_have_in_common(
    where: Callable[[np.ndarray], np.ndarray], which: str
) -> None:

    assert said(masking(where)).endswith(f"are not the samples': {which}, but should be trained on")


def test_labels_that_have_nothing_in_common_are_told_with_their_number_alone() -> None:
    scattered = said(masking(lambda labels: (np.arange(labels.size).reshape(labels.shape) % 5 == 1) & (labels >= 0)))
    assert scattered.endswith("labels of step 1 are not the samples': masked, but should be trained on")


def test_a_first_label_that_is_masked_is_no_mask_beside_its_place_where_nothing_should_be_masked() -> None:
    every = np.where(LONG.reference.labels < 0, 3, LONG.reference.labels)
    whole = replace(LONG, reference=replace(LONG.reference, labels=every))

    def first_masked(labels: np.ndarray) -> np.ndarray:
        return masking(at(0))(np.where(labels < 0, 3, labels))

    assert said(first_masked, whole).endswith("the first of each row is masked, but should be trained on")


def test_labels_of_cp_ranks_that_do_not_make_up_rows_are_not_told_by_a_shift() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16), cp_load_balance=False))
    assert "shifted" not in said(lambda labels: np.roll(labels, -1, axis=1)[:, :-1], trial)
    assert "each is the last of a cp rank's part" in said(lambda labels: masking(at(7))(labels), trial)


def test_labels_of_cp_ranks_that_are_shifted_before_they_are_cut_are_told_by_the_shift() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16), cp_load_balance=False))
    parts = [trial.ranks[rank].steps[0].microbatches[0] for rank in (0, 1)]
    whole = np.hstack([part.labels for part in parts if part.labels is not None])
    moved = np.hstack([whole[:, 1:], np.full((len(whole), 1), -100)])
    for rank, part in enumerate(parts):
        trial = with_step(trial, rank, 1, microbatches=(replace(part, labels=moved[:, 8 * rank : 8 * rank + 8]),))
    found = mismatched_labels(trial, 1)
    assert found and found.text == "labels are shifted by 1 more: each token predicts the token after the next"
