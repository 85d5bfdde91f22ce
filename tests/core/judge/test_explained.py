"""Explained differences: what they add up to, and what they leave unexplained."""

from __future__ import annotations

from dataclasses import replace

from literal import tiny_case, trial_of

from harness.core.case.allowance import Allowance
from harness.core.judge.explained import (
    ExplainedDifference,
    allowances_text,
    allowed_bytes,
    allowed_traffic,
    differences_by_plan,
    explained_total,
    explained_total_by_what,
    unexplained_total,
    without_allowances_of_kind,
)

KEPT = Allowance("kept", "1 x parameters", "a moving average of the weights")
LOGGED = Allowance("moved", 8, "the loss is logged", op="all_reduce", phase="forward", axis="world")
TRIAL = replace(trial_of(tiny_case("fsdp_2")), case=replace(tiny_case("fsdp_2"), allow=(KEPT, LOGGED, LOGGED)))


def test_what_the_plan_and_an_allowance_explain_adds_up() -> None:
    own = TRIAL.plan.parameter_bytes[1][1]
    kept = [ExplainedDifference("kept", 100), *allowed_bytes(TRIAL, 1, "kept")]
    assert (explained_total(kept), explained_total(without_allowances_of_kind(kept, "kept"))) == (100 + own, 100)
    assert without_allowances_of_kind(kept, "copied") == kept


def test_what_is_beyond_the_explained_of_one_collective_is_not_made_up_for_by_another() -> None:
    logged = ((0, 1), "all_reduce", "forward")
    explained = [*allowed_traffic(TRIAL, 0), *differences_by_plan({logged: 4, "other": 50})]
    assert explained_total_by_what(explained) == {logged: 20, "other": 50}
    assert unexplained_total({logged: 23, "other": 1, "unheard of": 2}, explained) == 5


def test_an_allowance_that_is_declared_twice_is_stated_once() -> None:
    text = allowances_text(TRIAL, {"moved": lambda allowance: allowance.phase == "backward"})
    assert text.count("the loss is logged") == 1
    assert text.endswith(", not used")
