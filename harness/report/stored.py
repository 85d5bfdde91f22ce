"""The report beside the evidence: report.txt for a person, verdict.json for programs."""

from __future__ import annotations

from harness.evidence.store import write_text
from harness.judge.judgement import Judgement
from harness.report.documents import case, document
from harness.report.text import case_report


def store_report(judgement: Judgement) -> None:
    """Leaves report.txt and verdict.json beside the evidence, the latter with every finding. Raises EvidenceError where that
    cannot be written."""
    write_text(judgement.folder / "report.txt", case_report(judgement) + "\n")
    write_text(judgement.folder / "verdict.json", document("case", case(judgement), indent=1) + "\n")
