"""Causes in words, and the lines of evidence below them."""

from __future__ import annotations

from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Diagnosis, Line
from harness.core.report.finding_text import finding_sentence


def diagnosis_line(diagnosis: Diagnosis | None) -> str:
    """Return all causes of a diagnosis on one line, behind the name of an earlier launch if it is of one.

    Empty without a diagnosis.
    """
    if diagnosis is None:
        return ""
    launch = f"{diagnosis.launch}: " if diagnosis.launch else ""
    return launch + "; ".join(map(cause_line, diagnosis.causes))


def cause_line(cause: Cause) -> str:
    """Return a cause on one line: "OBSERVED WHERE, requested EXPECTED: FINDING; HINT", each part if there is one."""
    text = " ".join(filter(None, (cause.observed, cause.where)))
    if cause.expected:
        text += f", requested {cause.expected}"
    finding = finding_sentence(cause.finding) if cause.finding is not None else ""
    if cause.finding is not None and not cause.observed:
        text = cause.finding.check
    details = "; ".join(filter(None, (finding, cause.hint)))
    return ": ".join(filter(None, (text, details)))


def evidence_rows(lines: tuple[Line, ...]) -> list[tuple[str, str]]:
    """Return (label, text) of each line of a diagnosis' evidence."""
    return [(label, _evidence_text(value)) for label, value in lines]


def _evidence_text(value: str | Finding | Cause) -> str:
    """Return a line of evidence as text: a finding's sentence, a cause's line, or the text itself."""
    if isinstance(value, Finding):
        return finding_sentence(value)
    return cause_line(value) if isinstance(value, Cause) else value
