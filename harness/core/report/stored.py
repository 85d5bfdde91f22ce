"""The report stored beside the evidence: report.txt for a person, verdict.json for programs."""

from __future__ import annotations

from harness.core.evidence.own_folders import has_keys, replace_own
from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Verdict
from harness.core.report.as_data import document_text
from harness.core.report.documents import case_document
from harness.core.report.text import case_report


def store_report(judgement: Judgement) -> None:
    """Write report.txt and verdict.json beside the evidence, the latter with every finding; older ones are replaced.

    Raises EvidenceError where they cannot be written, or a file of somebody else lies there.
    """
    replace_own(judgement.folder / "report.txt", case_report(judgement) + "\n", _is_report)
    replace_own(
        judgement.folder / "verdict.json",
        document_text("case", case_document(judgement), indent=1) + "\n",
        _is_document,
    )


def _is_report(text: str) -> bool:
    """Return whether a text begins as a report does: with a verdict, and the case's name."""
    return text.startswith(tuple(f"{verdict} " for verdict in Verdict))


def _is_document(text: str) -> bool:
    return has_keys(text, frozenset({"harness", "schema", "document", "case"}))
