"""A case that torch gets wrong is kept, and must fail in just the way that is written down."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from literal import tiny_case

from harness.core.case.case import CaseError, ExpectedFailure
from harness.core.case.loading import load_cases
from harness.core.judge.finding import Finding
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result, Verdict, diagnosis_of_one_cause
from harness.core.report.text import headline

EXPECTED = ExpectedFailure(
    because="torch drops a term", script="upstream_bugs/x.py", checks="gradients", named="gradients scaled"
)
CASE = replace(tiny_case("fsdp_2"), expected_failure=EXPECTED)


def judged(broken: str, kind: str = "", unknown: str = "", raised: str = "TypeError: no") -> Judgement:
    here = Finding(ranks=(1,), expected=0, observed=raised)
    results = [Result("loss", Verdict.PASS, 1)]
    results += [Result(check, Verdict.FAIL, 1, (here,)) for check in broken.split()]
    results += [Result(check, Verdict.UNKNOWN) for check in unknown.split()]
    diagnosis = diagnosis_of_one_cause(f"it is said that {kind}", kind=kind) if kind else None
    return Judgement(CASE, Path("out"), tuple(results), diagnosis, 1.0)


def test_it_fails_as_expected() -> None:
    judgement = judged("gradients", "gradients scaled")
    assert judgement.verdict is Verdict.XFAIL
    assert headline(judgement).endswith("(expected: torch drops a term; see upstream_bugs/x.py)")


def test_a_case_that_passes_although_it_is_expected_to_fail_is_a_failure() -> None:
    judgement = judged("")
    assert judgement.verdict is Verdict.FAIL
    assert headline(judgement) == (
        "FAIL tiny    (expected to fail by gradients, cause 'gradients scaled': if upstream_bugs/x.py passes too, take"
        " expected_failure out of cases/tiny.yaml)"
    )


@pytest.mark.parametrize(
    ("broken", "kind", "unknown"),
    [
        ("gradients update", "gradients scaled", ""),
        ("update", "gradients scaled", ""),
        ("gradients", "gradients scaled otherwise", ""),
        ("gradients", "gradients scaled", "update"),
    ],
)
def test_a_case_that_fails_in_another_way_than_expected_is_a_failure(broken: str, kind: str, unknown: str) -> None:
    assert judged(broken, kind, unknown).verdict is Verdict.FAIL


def test_ranks_that_die_leave_the_other_checks_unknown() -> None:
    case = replace(CASE, expected_failure=replace(EXPECTED, checks="completed", named="a process failed"))
    assert replace(judged("completed", "a process failed", "gradients"), case=case).verdict is Verdict.XFAIL


@pytest.mark.parametrize(("raised", "verdict"), [("a mesh", Verdict.XFAIL), ("a graph", Verdict.FAIL)])
def test_what_a_rank_raised_is_expected_too(raised: str, verdict: Verdict) -> None:
    case = replace(CASE, expected_failure=replace(EXPECTED, raised="a mesh"))
    found = judged("gradients", "gradients scaled", raised=f"TypeError: {raised} is saved")
    assert replace(found, case=case).verdict is verdict


def test_a_fault_is_judged_as_if_nothing_were_expected() -> None:
    assert replace(judged("gradients", "gradients scaled"), fault="x").verdict is Verdict.FAIL


def test_on_a_torch_of_which_nothing_is_expected_the_case_is_judged_as_any_other() -> None:
    case = replace(CASE, expected_failure=replace(EXPECTED, torch="<2.15"))
    wrong = replace(judged("gradients", "gradients scaled"), case=case)
    right = replace(judged(""), case=case)
    old, new = {"torch": "2.14.1"}, {"torch": "2.15.0"}
    verdicts = [replace(each, made=made).verdict for made in (old, new) for each in (wrong, right)]
    assert verdicts == [Verdict.XFAIL, Verdict.FAIL, Verdict.FAIL, Verdict.PASS]
    assert headline(replace(right, made=new)) == "PASS tiny"


def test_an_expected_failure_of_which_nothing_could_be_judged_is_unknown() -> None:
    assert judged("", unknown="completed gradients").verdict is Verdict.UNKNOWN


YAML = "cases:\n  x:\n    why: because\n    expected_failure: {%s}\n"


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("because: a, checks: b, named: c", "expected_failure: script is missing"),
        (
            "because: a, checks: b, named: c, script: no.py",
            "expected_failure: script 'no.py' not found in /",
        ),
        (
            "because: a, checks: b, named: c, script: upstream_bugs/zero_bubble_ddp.py, torch: '2.15'",
            'expected_failure: torch: \'2.15\': expected "<" or ">=" and a release, such as "<2.15"',
        ),
        ("becos: a", "expected_failure: unknown key 'becos' (did you mean 'because'?)"),
    ],
)
def test_an_expectation_without_evidence_is_refused(tmp_path: Path, written: str, message: str) -> None:
    (tmp_path / "a.yaml").write_text(YAML % written)
    with pytest.raises(CaseError) as error:
        load_cases(tmp_path / "a.yaml")
    assert message in str(error.value)
