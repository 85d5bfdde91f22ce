"""Labels that are not the samples', told by what those that are wrong have in common. Literal evidence, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import dims
from literal import ADAMW, tiny_case, trial_of, with_step

from harness.diagnosis.labels import lost_labels, mismatched_labels
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

LENGTH_16 = replace(ADAMW, seq_len=16)


def relabelled(
    change: Callable[[np.ndarray], np.ndarray], trial: Trial, ranks: Sequence[int] = (), step: int = 1
) -> Trial:
    """What the losses of these ranks (all) were computed from in a step, by the labels that it should have been."""
    for rank in ranks or trial.ranks:
        record = trial.ranks[rank].steps[step - 1]
        parts = tuple(replace(part, labels=change(part.labels.copy())) for part in record.microbatches)
        trial = with_step(trial, rank, step, microbatches=parts)
    return trial


def labelled(change: Callable[[np.ndarray], np.ndarray], trial: Trial) -> Trial:
    """Samples that have these labels, in every step, of which all losses are computed."""
    for step in trial.case.steps:
        trial = relabelled(change, trial, step=step)
    return replace(trial, reference=replace(trial.reference, labels=change(trial.reference.labels)))


def at_every_token(labels: np.ndarray) -> np.ndarray:
    return np.where(labels < 0, 3, labels)


LONG = labelled(lambda labels: np.where(labels < 0, -100, labels - 1), trial_of(tiny_case(dims(shard=4), LENGTH_16)))
"""Labels are 0 to 6, and some do not count."""


def said(
    change: Callable[[np.ndarray], np.ndarray], trial: Trial = LONG, ranks: Sequence[int] = (), step: int = 1
) -> str:
    found = mismatched_labels(relabelled(change, trial, ranks, step), step)
    assert found is None or found.kind == (
        "labels shifted" if "not shifted" in cause_line(found) or "shifted by" in cause_line(found) else "wrong labels"
    )
    return cause_line(found) if found else ""


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
    assert mismatched_labels(LONG, 1) is None
    if by == 1:  # another label in the last place that counts: then not all are shifted
        odd = said(lambda labels: np.where(at(14)(labels), 0, shifted(labels)))
        assert "shifted" not in odd


def masking(where: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda labels: np.where(where(labels), -100, labels)


def at(*places: int) -> Callable[[np.ndarray], np.ndarray]:
    return lambda labels: np.isin(np.arange(labels.shape[1]), places) & np.ones_like(labels, bool)


@pytest.mark.parametrize(
    ("where", "which"),
    [
        (lambda labels: labels == 3, "all of them are token 3, masked"),
        (lambda labels: labels >= 4, "all from token 4 on are masked"),
        (lambda labels: labels == 0, "all of them are token 0, masked"),
        (lambda labels: labels <= 2, "all up to token 2 are masked"),
        (lambda labels: (labels == 1) | (labels == 2), "masked"),
        (lambda labels: (labels == 6) | (labels == 5) & (np.arange(labels.shape[1]) % 2 == 0), "masked"),
        (lambda labels: (labels == 0) | (labels == 1) & (np.arange(labels.shape[1]) % 2 == 0), "masked"),
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
    whole = labelled(at_every_token, LONG)
    assert said(masking(at(0)), whole).endswith("the first of each row is masked, but should be trained on")
    assert said(lambda labels: np.full_like(labels, -100), whole).endswith("samples': masked, but should be trained on")


def test_labels_of_cp_ranks_that_do_not_make_up_rows_are_not_told_by_a_shift() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), LENGTH_16, cp_load_balance=False))
    assert "shifted" not in said(lambda labels: np.roll(labels, -1, axis=1)[:, :-1], trial)
    assert "each is the last of a cp rank's part" in said(lambda labels: masking(at(7))(labels), trial)


def test_labels_of_cp_ranks_that_are_shifted_before_they_are_cut_are_told_by_the_shift() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), LENGTH_16, cp_load_balance=False))
    parts = [trial.ranks[rank].steps[0].microbatches[0] for rank in (0, 1)]
    whole = np.hstack([part.labels for part in parts if part.labels is not None])
    moved = np.hstack([whole[:, 1:], np.full((len(whole), 1), -100)])
    for rank, part in enumerate(parts):
        trial = with_step(trial, rank, 1, microbatches=(replace(part, labels=moved[:, 8 * rank : 8 * rank + 8]),))
    found = mismatched_labels(trial, 1)
    assert found and cause_line(found) == "labels are shifted by 1 more: each token predicts the token after the next"


TP = labelled(at_every_token, trial_of(tiny_case("fsdp_2_tp_2", LENGTH_16)))
FIFTH = "those at position 5 are masked, but should be trained on"


@pytest.mark.parametrize(
    ("ranks", "told"),
    [
        ((), f"wrong labels: tokens are right, 8 labels of step 1 are not the samples': {FIFTH}"),
        ((0, 1), f"wrong labels on ranks [0,1]: tokens are right, 4 labels of step 1 are not the samples': {FIFTH}"),
        ((1,), f"wrong labels on rank 1: tokens are right, 4 labels of step 1 are not the samples': {FIFTH}"),
    ],
)
def test_labels_that_the_ranks_of_a_tp_group_share_are_counted_once(ranks: Sequence[int], told: str) -> None:
    assert said(masking(at(5)), TP, ranks) == told


def test_one_wrong_label_is_told_as_one() -> None:
    def first_row(labels: np.ndarray) -> np.ndarray:
        labels[0, np.argmax(labels[0] >= 0)] = -100
        return labels

    told = "wrong labels on rank 2: tokens are right, 1 label of step 1 is not the samples': masked, but should be trained on"
    assert said(first_row, ranks=[2]) == told


@pytest.mark.parametrize(("by", "side"), [(1, "late"), (-1, "early")])
def test_a_mask_that_is_moved_is_told_whatever_comes_in_from_outside(by: int, side: str) -> None:
    trial = labelled(masking(at(0, 4, 5, 9, 15)), LONG)
    assert mismatched_labels(trial, 1) is None

    def moved(labels: np.ndarray) -> np.ndarray:
        return np.where(np.roll(labels, by, axis=1) < 0, -100, np.where(labels < 0, 0, labels))

    assert said(moved, trial).endswith(f"labels of step 1 are not the samples': the mask is one position {side}")


def test_labels_of_shorter_steps_are_told_by_the_positions_of_these() -> None:
    varied = replace(LENGTH_16, variable_length=True)
    trial = labelled(at_every_token, trial_of(tiny_case(dims(shard=4), varied)))
    assert said(masking(at(5)), trial, step=2).endswith(f"8 labels of step 2 are not the samples': {FIFTH}")
    for balanced in (False, True):
        trial = trial_of(tiny_case(ParallelDims(cp=2), varied, cp_load_balance=balanced))
        told = ": each is the last of a cp rank's part, as if labels were shifted after the sequence was cut"
        assert said(masking(at(3)), trial, step=2).endswith(told)


@pytest.mark.parametrize("layout", [dims(shard=4), ParallelDims(cp=2)])
def test_where_not_all_tokens_were_seen_labels_are_told_without_what_rows_have_in_common(layout: ParallelDims) -> None:
    trial = trial_of(tiny_case(layout, LENGTH_16))
    last = max(trial.ranks)
    (part,) = trial.ranks[last].steps[0].microbatches
    trial = with_step(trial, last, 1, microbatches=(replace(part, tokens=None),))
    told = said(masking(lambda labels: labels >= 4), trial, ranks=[0])
    assert told.endswith("labels of step 1 are not the samples': masked, but should be trained on")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda labels: labels, None),
        (
            lambda labels: labels[:, 1:],
            ("labels shifted", "labels are shifted by 1 more: each token predicts the token after the next"),
        ),
        (
            lambda labels: labels[:, 2:-3],
            ("labels shifted", "labels are shifted by 2 more: each token predicts the token 2 places further"),
        ),
        (
            lambda labels: labels[:, :-3],
            (
                "labels lost",
                "the loss is computed from too few or too many labels: rank 0, step 2, labels of each microbatch: expected"
                " [32], observed [26] (expected: a label for each token)",
            ),
        ),
    ],
)
def test_labels_that_are_too_few_are_told_by_their_shift_or_their_number(
    change: Callable[[np.ndarray], np.ndarray], told: tuple[str, str] | None
) -> None:
    trial = relabelled(change, LONG, step=2)
    assert lost_labels(trial, 1) is None
    found = lost_labels(trial, 2)
    assert (found.kind, cause_line(found)) == told if found else told is None


def test_a_shift_is_told_of_labels_whose_loss_is_computed_in_chunks_along_the_sequence() -> None:
    trial = LONG
    for rank in trial.ranks:
        (part,) = trial.ranks[rank].steps[0].microbatches
        assert part.labels is not None
        moved = np.hstack([part.labels[:, 1:], np.full((len(part.labels), 1), -100)])
        halves = np.concatenate([moved[:, :8].reshape(-1), moved[:, 8:].reshape(-1)])
        chunks = (halves.size // 2,) * 2
        trial = with_step(trial, rank, 1, microbatches=(replace(part, labels=halves, chunks=chunks),))
    found = mismatched_labels(trial, 1)
    assert found and cause_line(found) == "labels are shifted by 1 more: each token predicts the token after the next"
