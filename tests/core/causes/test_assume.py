"""What is assumed besides what is assumed already: values go through both, all else the second one says."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from literal import of_layout_alone, tiny_case, trial_of

from harness.core.case.measured import MeasuredTraits
from harness.core.causes import assume
from harness.core.judge.assumed import AS_REQUESTED
from harness.core.judge.trial import Trial
from harness.core.plan.plan import without_slices

RIGHT = trial_of(tiny_case("ddp_2"))


@pytest.fixture(autouse=True)
def _nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assume, "retrain", lambda model, training, reference, **otherwise: reference)


def both(key: str, first: Any, second: Any) -> Any:
    return assume.assume_reference(
        assume.assume_reference(RIGHT, **{key: first}), **{key: second}
    ).assumption.reference[key]


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


def test_a_reference_is_trained_by_the_case_and_in_the_order_of_rows_of_the_trainer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(assume, "retrain", lambda *of, **words: (seen.append((of, words)), of[2])[1])
    assume.assume_reference(RIGHT, amsgrad=True)
    assume.assume_reference(_with_rows(RIGHT, order := np.array([1, 0])), amsgrad=True)
    case, reference = RIGHT.case, RIGHT.reference
    assert seen[0] == ((case.model, case.training, reference), {"amsgrad": True})
    assert seen[1][1]["rows"] == {"norm.weight": order}
    monkeypatch.setattr(type(RIGHT.plan), "column_blocks", {"layers.0.attention.wo.weight": 2})
    assume.assume_reference(RIGHT)
    assert seen[2][1] == {"columns": {"layers.0.attention.wo.weight": 2}}


Calls = list[tuple[tuple[Any, ...], dict[str, Any]]]


def calls_of(monkeypatch: pytest.MonkeyPatch, of: Any, name: str, gives: Any) -> Calls:
    """gives: what it returns, of its arguments."""
    seen: Calls = []
    monkeypatch.setattr(of, name, lambda *args, **named: (seen.append((args, named)), gives(*args))[1])
    return seen


def test_the_plan_of_another_case_is_of_the_same_trainer_torch_and_observed_units(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    traits = replace(RIGHT.traits, measured=MeasuredTraits({0: ()}, torch="2.14"))
    trial = replace(RIGHT, plan=replace(RIGHT.plan, traits=traits))
    plans = calls_of(monkeypatch, assume, "make_plan", lambda *of: "the plan")
    changed = assume.assume_features(trial, loss_parallel=False)
    assert plans == [((changed.case, traits), {})]
    assert (changed.plan, changed.case.features.loss_parallel) == ("the plan", False)
    assert replace(changed.case, features=trial.case.features) == trial.case


@pytest.mark.parametrize("derived", [True, False])
def test_the_plan_of_another_case_says_what_ranks_hold_unless_that_of_a_recording_did_not(derived: bool) -> None:
    trial = RIGHT if derived else replace(RIGHT, plan=without_slices(RIGHT.plan))
    changed = assume.assume_features(of_layout_alone(trial), loss_parallel=False).plan
    assert [bool(held) for held in changed.slices.values()] == [derived, derived]
    assert not changed.is_exact
    unrecorded = assume.assume_features(trial, loss_parallel=False).plan
    assert all(unrecorded.slices.values()) and unrecorded.is_exact


@pytest.mark.parametrize(("runs", "references"), [(("a", "b"), {0: "b", 1: "a"}), (("a",), {})])
def test_ranks_that_train_apart_have_a_reference_each_and_one_copy_is_everybodys(
    monkeypatch: pytest.MonkeyPatch, runs: tuple[str, ...], references: dict[int, str]
) -> None:
    trained = calls_of(monkeypatch, assume, "retrain_separately", lambda *of: runs)
    trial = RIGHT.with_assumption(reference={"amsgrad": True})
    changed = assume.assume_separate_copies(trial, {0: 1, 1: 0}, [{"left": 1}, {"left": 2}], owners=(0, 1))
    each = [{"amsgrad": True, "left": 1}, {"amsgrad": True, "left": 2}]
    assert trained == [((RIGHT.case.model, RIGHT.case.training, RIGHT.reference, each), {"owners": (0, 1)})]
    assert (changed.reference, changed.assumption.references) == ("a", references)


def test_what_is_assumed_apart_is_not_as_requested_even_with_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    calls_of(monkeypatch, assume, "retrain_separately", lambda *of: ("a",))
    assert RIGHT.assumption == AS_REQUESTED != assume.assume_separate_copies(RIGHT, {0: 0, 1: 0}, [{}]).assumption


def _with_rows(trial: Trial, order: np.ndarray) -> Trial:
    return replace(trial, reference=replace(trial.reference, rows={"norm.weight": order}))
