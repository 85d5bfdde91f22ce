"""A run as JUnit's XML."""

from __future__ import annotations

from xml.etree.ElementTree import fromstring

from harness.core.report.outcome import ERROR, SKIPPED, Outcome
from harness.nights.pages.junit import junit_xml

OUTCOMES = [
    Outcome("right", "PASS", seconds=1.26),
    Outcome("expected", "XFAIL"),
    Outcome("broken", "FAIL", cause="another layout: dp_shard 4", report="FAIL broken\n  \x1b[31m<rank> & \udc80"),
    Outcome("undecided", "UNKNOWN", reason="no golden"),
    Outcome("raised", ERROR, reason="a mistake"),
    Outcome("left_out", SKIPPED, reason="no such option"),
]


def test_each_case_is_a_test_with_its_cause() -> None:
    suite = fromstring(junit_xml(OUTCOMES))
    kinds = {test.get("name"): [child.tag for child in test] for test in suite}
    assert kinds == {
        "right": [],
        "expected": [],
        "broken": ["failure"],
        "undecided": ["error"],
        "raised": ["error"],
        "left_out": ["skipped"],
    }
    counts = [suite.get(key) for key in ("tests", "failures", "errors", "skipped")]
    assert counts == ["6", "1", "2", "1"]
    (failure,) = suite.findall("testcase/failure")
    assert failure.get("message") == "another layout: dp_shard 4"
    assert suite[0].get("time") == "1.3"


def test_a_case_without_a_verdict_is_an_error() -> None:
    suite = fromstring(junit_xml(OUTCOMES[:1], ["a: no verdict", "b: no verdict"]))
    assert [suite.get("tests"), suite.get("errors")] == ["2", "1"]
    assert "b: no verdict" in (suite[1][0].text or "")
