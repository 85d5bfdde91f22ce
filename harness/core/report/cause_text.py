"""Causes in words, and the lines of evidence below them."""

from __future__ import annotations

from harness.core.judge.finding import Finding
from harness.core.judge.result import Cause, Diagnosis, Line
from harness.core.report.finding_text import sentence


def diagnosis_line(diagnosis: Diagnosis | None) -> str:
    """Return all causes on one line; nothing where there is no diagnosis."""
    if diagnosis is None:
        return ""
    launch = f"{diagnosis.launch}: " if diagnosis.launch else ""
    return launch + "; ".join(map(cause_line, diagnosis.causes))


def cause_line(cause: Cause) -> str:
    """Return what is so, where, what was requested, and the hint or finding."""
    text = " ".join(filter(None, (cause.observed, cause.where))) + f", requested {cause.expected}" * bool(
        cause.expected
    )
    found = sentence(cause.finding) if cause.finding is not None else ""
    if cause.finding is not None and not cause.observed:
        text = cause.finding.check
    return ": ".join(filter(None, (text, "; ".join(filter(None, (found, cause.hint))))))


def evidence_rows(lines: tuple[Line, ...]) -> list[tuple[str, str]]:
    """Return each line's label and what stands beside it, in words."""
    return [(label, _words(value)) for label, value in lines]


def _words(value: str | Finding | Cause) -> str:
    if isinstance(value, Finding):
        return sentence(value)
    return cause_line(value) if isinstance(value, Cause) else value
