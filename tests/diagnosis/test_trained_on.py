"""The reference as trained on the rows that ranks received: its samples, their labels and how often they count."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from literal import tiny_case, trial_of, with_step

from harness.diagnosis import received as received_module
from harness.diagnosis.received import Rows, received, trained_on
from harness.judge.trial import Trial
from harness.reference.record import ReferenceRun

RIGHT = trial_of(tiny_case("single"))
TOKENS, LABELS = RIGHT.reference.tokens, RIGHT.reference.labels
STRANGE = np.array([[50, 51, 52, 53]])


@dataclass
class Batch:
    labels: np.ndarray
    counts: np.ndarray | None = None


@pytest.fixture(autouse=True)
def words(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """With what the reference was trained again: nothing is trained."""
    told: dict[str, Any] = {}

    def trained(trial: Trial, **otherwise: Any) -> Trial:
        told.update(otherwise)
        return trial

    monkeypatch.setattr(received_module, "another_reference", trained)
    return told


def rows(*parts: tuple[np.ndarray, np.ndarray]) -> Rows:
    """Tokens and labels, as put together of a step in which they were received; shorter ones are of a shorter step."""
    tokens, labels = (np.vstack([pair[which] for pair in parts]) for which in (0, 1))
    if tokens.shape[1] < TOKENS.shape[1]:
        return Rows(tokens, labels)
    (part,) = RIGHT.ranks[0].steps[0].microbatches
    found = received(with_step(RIGHT, 0, 1, microbatches=(replace(part, tokens=tokens, labels=labels),)), 1)
    assert found is not None and np.array_equal(found.tokens, tokens) and np.array_equal(found.labels, labels)
    return found


def of(place: int, width: int = 4) -> tuple[np.ndarray, np.ndarray]:
    """A sample's tokens and labels."""
    return TOKENS[place, :width], LABELS[place, :width]


def samples_of(reference: ReferenceRun, step: int, width: int = 4) -> list[tuple[list[int], list[int]]]:
    """Tokens and labels of what a step trains on."""
    places = [reference.sample_ids.index(id_) for id_ in reference.samples[step - 1]]
    return [(reference.tokens[at, :width].tolist(), reference.labels[at, :width].tolist()) for at in places]


def test_samples_of_the_recipe_keep_their_numbers_wherever_they_are_received() -> None:
    changed = trained_on(RIGHT, {1: rows(of(9), of(2)), 3: rows(of(0), of(0))}).reference
    assert changed.samples == ((9, 2), RIGHT.reference.samples[1], (0, 0))
    assert changed.sample_ids == RIGHT.reference.sample_ids
    assert np.array_equal(changed.tokens, TOKENS) and np.array_equal(changed.labels, LABELS)


def test_a_row_of_no_sample_is_one_more_with_the_next_number() -> None:
    numbered = replace(RIGHT.reference, sample_ids=(*range(99, 99 - 24, -1),))
    changed = trained_on(replace(RIGHT, reference=numbered), {2: rows((STRANGE, STRANGE + 1), of(0))}).reference
    assert changed.samples == (RIGHT.reference.samples[0], (100, 99), RIGHT.reference.samples[2])
    assert changed.sample_ids == (*numbered.sample_ids, 100)
    assert changed.tokens.tolist() == [*TOKENS.tolist(), [50, 51, 52, 53]]
    assert changed.labels.tolist() == [*LABELS.tolist(), [51, 52, 53, 54]]


def test_rows_of_a_shorter_step_are_the_samples_that_begin_so_or_are_filled_up() -> None:
    short = rows((STRANGE[:, :2], STRANGE[:, 1:3]), (TOKENS[0, :2], np.array([30, 31])))
    changed = trained_on(RIGHT, {2: short}).reference
    known = next(place for place in reversed(range(24)) if np.array_equal(TOKENS[place, :2], TOKENS[0, :2]))
    assert changed.samples[1] == (24, known)
    assert changed.tokens.tolist() == [*TOKENS.tolist(), [50, 51, -100, -100]]
    labels = LABELS.tolist()
    labels[known][:2] = [30, 31]
    assert changed.labels.tolist() == [*labels, [51, 52, -100, -100]]


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("tokens", [TOKENS[0], STRANGE[0]], ids=["a sample", "none"])
def test_the_same_tokens_with_other_labels_are_another_sample_each_time(tokens: np.ndarray, width: int) -> None:
    given = [(tokens[:width], np.full(width, label)) for label in (30, 31, 32, 31, 30)]
    changed = trained_on(RIGHT, {1: rows(*given), 3: rows(given[1])}).reference
    wanted = [(row.tolist(), labels.tolist()) for row, labels in given]
    assert samples_of(changed, 1, width) == wanted and samples_of(changed, 3, width) == wanted[1:2]
    assert len(set(changed.sample_ids)) == len(changed.sample_ids) == len(changed.tokens) == len(changed.labels)


def test_a_row_that_is_received_again_is_no_further_sample() -> None:
    again = rows((STRANGE, STRANGE + 1), (TOKENS[0], np.full(4, 3)))
    changed = trained_on(RIGHT, {1: again, 2: again}).reference
    assert changed.samples[:2] == ((24, 0), (24, 0)) and len(changed.tokens) == 25


def test_losses_count_as_often_as_is_told_of_the_step_and_once_where_nothing_is(words: dict[str, Any]) -> None:
    trained_on(RIGHT, {1: rows(of(0))})
    assert not words
    trained_on(RIGHT, {1: rows(of(0))}, {1: 0.75})
    (batch,) = words.values()
    assert [*words] == ["batch"]
    counted = {step: batch(step, Batch(LABELS[:2])) for step in (1, 2)}
    assert counted[1].counts.tolist() == [[0.75] * 4] * 2 and counted[2].counts.tolist() == [[1.0] * 4] * 2
    assert np.array_equal(counted[1].labels, LABELS[:2])
