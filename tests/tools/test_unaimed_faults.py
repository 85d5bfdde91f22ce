"""Faults on cases that nobody chose for them: which are tried, what counts as noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from literal import SGD, tiny_case

from harness.faults import fault
from harness.faults.attempt import Attempt, Outcome, accepted
from harness.judge.finding import Finding
from harness.judge.judgement import Judgement
from harness.judge.result import Result, Verdict
from harness.run.options import Options
from harness.spec.case import Case
from harness.spec.loading import load_all
from tools import unaimed_faults
from tools.noticed import Searched, line, load, noticed, store
from tools.unaimed_faults import likeliest, search


def case(name: str, layout: str, tier: str = "default", **changes: Any) -> Case:
    return replace(tiny_case(layout, **changes), name=name, tier=tier)


OWN = case("own", "fsdp_2", "nightly", training=SGD)
ALIKE, OTHER = case("alike", "fsdp_2"), case("other", "tp_2")
CASES = [OTHER, ALIKE, OWN]


WRONG = fault(breaks="-", bug="-", case="own", caught_by="loss", named="-", does=lambda fired: fired())
wrong = replace(WRONG, name="wrong")  # as when it is loaded from a file


def attempt(name: str, case: str, outcome: Outcome = Outcome.CAUGHT) -> Attempt:
    return Attempt(name, "M01", "mesh", True, case, outcome)


def broken_on(
    name: str, verdict: Verdict = Verdict.FAIL, *, fired: bool = True
) -> Callable[[Case, Options], Judgement]:
    """Without a fault every case passes; with one it is noticed on the case of that name."""

    def run(case: Case, options: Options) -> Judgement:
        wrong_here = options.fault is not None and case.name == name
        result = Result(
            "loss",
            verdict if wrong_here else Verdict.PASS,
            1,
            (Finding(name="-", expected="-", observed="-"),) * wrong_here,
        )
        return Judgement(case, Path("-"), (result,), None, 0.0, options.fault, fired if options.fault else None)

    return run


def test_the_cases_most_like_a_faults_own_are_tried_first() -> None:
    assert [case.name for case in likeliest(wrong, CASES)] == ["alike", "other"]


@pytest.mark.parametrize("verdict", [Verdict.FAIL, Verdict.UNKNOWN])
def test_a_fault_is_noticed_on_the_first_case_whose_checks_do_not_hold(monkeypatch: Any, verdict: Verdict) -> None:
    monkeypatch.setattr(unaimed_faults, "run_case", broken_on("other", verdict))
    assert search(wrong, CASES, Options()) == Searched("wrong", "other", ("loss",), ("alike",), True)


def test_a_fault_that_no_case_notices_says_whether_it_fired(monkeypatch: Any) -> None:
    for fired in (True, False):
        monkeypatch.setattr(unaimed_faults, "run_case", broken_on("nowhere", fired=fired))
        assert search(wrong, CASES, Options()) == Searched("wrong", "", (), ("alike", "other"), fired)


def test_only_faults_that_can_fire_in_the_default_tier_are_counted() -> None:
    done = [attempt("aimed", "alike"), attempt("missed", "other", Outcome.MISSED)]
    done += [attempt(name, "own") for name in ("found", "passed", "silent", "not_searched")]
    found = [Searched("found", "other", ("loss",), (), True), Searched("passed", "", (), ("alike",), True)]
    found += [Searched("silent", "", (), ("alike",), False)]
    every = {"aimed": "alike", "missed": "", "found": "other", "passed": ""}
    assert dict(noticed(done, CASES, found)) == every
    assert line(done, CASES, found) == (
        "`make matrix`, which is told neither the fault nor its case, notices 50% of the faults of the catalogue"
        " that fire in it (`python -m tools.unaimed_faults`)."
    )


def test_a_case_that_has_left_the_tier_notices_nothing_there() -> None:
    found = [Searched("found", "own", ("loss",), (), True)]
    assert dict(noticed([attempt("found", "own")], CASES, found)) == {"found": ""}


def test_what_was_searched_is_stored_in_the_place_of_what_was(tmp_path: Path) -> None:
    stored = tmp_path / "unaimed_faults.json"
    for case_name in ("alike", "other"):
        store([Searched("one", case_name, ("loss",), (), True)], stored)
    assert load(stored) == [Searched("one", "other", ("loss",), (), True)]


def test_the_default_tier_notices_nearly_every_fault_that_fires_in_it() -> None:
    seen = [case for _, case in noticed(accepted(), load_all(), load())]
    assert sum(map(bool, seen)) >= 0.95 * len(seen)
