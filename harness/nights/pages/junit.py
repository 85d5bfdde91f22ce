"""A run as JUnit XML, which CI systems show: a test for each case."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from harness.core.judge.result import Verdict
from harness.core.report.outcome import Outcome

LETTERS_NOT_IN_XML = {number: " " for number in (*range(32), 0xFFFE, 0xFFFF) if chr(number) not in "\t\n"}


def junit_xml(outcomes: Sequence[Outcome], missing: Sequence[str] = ()) -> str:
    """Return the JUnit XML of outcomes, one test a case. A FAIL is a failure; what could not be judged is an error.

    missing: sentences on cases without a verdict, which become one more test, an error.
    """
    suite = Element("testsuite", name="harness", tests=str(len(outcomes) + bool(missing)))
    for outcome in outcomes:
        _add_test(suite, outcome)
    if missing:
        test = SubElement(suite, "testcase", classname="harness", name="every case has a verdict", time="0")
        SubElement(test, "error", message=_xml_text(missing[0])).text = _xml_text("\n".join(missing))
    for kind, name in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(kind, str(len(suite.findall(f"testcase/{name}"))))
    return tostring(suite, encoding="unicode", xml_declaration=True)


def _add_test(suite: Element, outcome: Outcome) -> None:
    """Add a testcase for one case to the suite, with its seconds.

    Inside of it is `skipped` with the reason, `failure` for a FAIL, or `error` for what could not be judged. Failure and
    error have the cause, else the reason, as message, and the report as text. Nothing is inside if the case is green.
    """
    attributes = {"classname": "harness", "name": _xml_text(outcome.case), "time": f"{outcome.seconds:.1f}"}
    test = SubElement(suite, "testcase", attributes)
    if outcome.skipped:
        SubElement(test, "skipped", message=_xml_text(outcome.reason))
    elif outcome.failed:
        kind = "failure" if outcome.verdict == Verdict.FAIL else "error"
        SubElement(test, kind, message=_xml_text(outcome.cause or outcome.reason)).text = _xml_text(
            outcome.report or outcome.reason
        )


def _xml_text(text: str) -> str:
    """Return the text with a space for each control character that XML cannot hold, and "?" for what UTF-8 cannot hold."""
    return text.translate(LETTERS_NOT_IN_XML).encode("utf-8", "replace").decode()
