"""What is assumed besides what is assumed already: values go through both, all else the second one says."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from literal import tiny_case, trial_of, with_rank

from harness.diagnosis import assume
from harness.judge.trial import Trial

RIGHT = trial_of(tiny_case("ddp_2"))


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assume, "retrain", lambda model, training, reference, **otherwise: reference)


def both(key: str, first: Any, second: Any) -> Any:
    return assume.another_reference(assume.another_reference(RIGHT, **{key: first}), **{key: second}).otherwise[key]


@pytest.mark.parametrize("key", ["batch", "gradients", "left"])
def test_values_are_changed_by_one_after_the_other(key: str) -> None:
    changed = both(key, lambda step, seen: [*seen, (1, step)], lambda step, seen: [*seen, (2, step)])
    assert changed(3, ["as it was"]) == ["as it was", (1, 3), (2, 3)]


def test_a_model_is_altered_by_one_after_the_other() -> None:
    altered: list[object] = []
    both("altered", lambda *of: altered.append((1, *of)), lambda *of: altered.append((2, *of)))("model", 3)
    assert altered == [(1, "model", 3), (2, "model", 3)]


def test_what_either_leaves_alone_the_optimizer_is_not_given() -> None:
    given = both("given", lambda step, seen: {"a": 1, "b": 1}, lambda step, seen: {"b": 2, "c": 2})
    assert given(3, {}) == {"b": 2}


def test_all_else_the_second_says_alone() -> None:
    assert both("rate", "the first", "the second") == "the second"


def test_a_reference_is_trained_by_the_case_and_in_the_order_of_rows_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(assume, "retrain", lambda *of, **words: (seen.append((of, words)), of[2])[1])
    assume.another_reference(RIGHT, amsgrad=True)
    assume.another_reference(_with_rows(RIGHT, order := np.array([1, 0])), amsgrad=True)
    case, reference = RIGHT.case, RIGHT.reference
    assert seen[0] == ((case.model, case.training, reference), {"amsgrad": True})
    assert seen[1][1]["rows"] == {"norm.weight": order}


def _with_rows(trial: Trial, order: np.ndarray) -> Trial:
    return with_rank(trial, 1, rows={"norm.weight": order})
