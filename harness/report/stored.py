"""The report beside the evidence: report.txt for a person, verdict.json for programs."""

from __future__ import annotations

import dataclasses
import json

from harness.evidence.store import write_text
from harness.judge.judgement import Judgement
from harness.report.text import case_report


def store_report(judgement: Judgement) -> None:
    """Leaves report.txt and verdict.json beside the evidence, the latter with every finding. Raises EvidenceError where that
    cannot be written."""
    write_text(judgement.folder / "report.txt", case_report(judgement) + "\n")
    record = {
        "case": judgement.case.name,
        "verdict": judgement.verdict,
        "cause": judgement.diagnosis.cause if judgement.diagnosis else None,
        "kinds": judgement.diagnosis.kinds if judgement.diagnosis else (),
        "launch": judgement.made.get("launch", ""),
        "fault": judgement.fault,
        "fired": judgement.fired,
        "replaced": judgement.replaced,
        "results": [dataclasses.asdict(one) for one in judgement.results],
    }
    write_text(judgement.folder / "verdict.json", json.dumps(record, indent=1))
