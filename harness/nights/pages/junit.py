"""A run as JUnit XML, which CI systems show: a test for each case."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree.ElementTree import Element, SubElement, tostring

from harness.core.judge.result import Verdict
from harness.core.report.outcome import Outcome

NO_XML = {number: " " for number in (*range(32), 0xFFFE, 0xFFFF) if chr(number) not in "\t\n"}


def junit(outcomes: Sequence[Outcome], missing: Sequence[str] = ()) -> str:
    """Return the XML. What could not be judged is an error, a FAIL a failure. missing: sentences on cases without a verdict."""
    suite = Element("testsuite", name="harness", tests=str(len(outcomes) + bool(missing)))
    for one in outcomes:
        _case(suite, one)
    if missing:
        lacking = SubElement(suite, "testcase", classname="harness", name="every case has a verdict", time="0")
        SubElement(lacking, "error", message=_text(missing[0])).text = _text("\n".join(missing))
    for kind, name in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(kind, str(len(suite.findall(f"testcase/{name}"))))
    return tostring(suite, encoding="unicode", xml_declaration=True)


def _case(suite: Element, one: Outcome) -> None:
    place = {"classname": "harness", "name": _text(one.case), "time": f"{one.seconds:.1f}"}
    test = SubElement(suite, "testcase", place)
    if one.skipped:
        SubElement(test, "skipped", message=_text(one.reason))
    elif one.failed:
        kind = "failure" if one.verdict == Verdict.FAIL else "error"
        SubElement(test, kind, message=_text(one.cause or one.reason)).text = _text(one.report or one.reason)


def _text(text: str) -> str:
    """Return it without what XML cannot hold."""
    return text.translate(NO_XML).encode("utf-8", "replace").decode()
