"""Documents that `--json` prints, with the data from which the texts are made. schema.json defines their shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.core.judge.judgement import Judgement
from harness.core.judge.result import Result
from harness.core.report.as_data import as_data
from harness.core.report.cause_text import diagnosis_line
from harness.core.report.finding_text import MAX_SHOWN_FINDINGS
from harness.core.report.text import rerun_command

SCHEMA_FILE = Path(__file__).with_name("schema.json")


def case_document(judgement: Judgement) -> dict[str, Any]:
    """Return the data of a judged case, by key. Its folder and the command that runs it again are left out.

    Both change with the folder in which a person is.
    """
    return {
        "case": judgement.case.name,
        "trainer": judgement.trainer,
        "verdict": judgement.verdict,
        "cause": diagnosis_line(judgement.diagnosis),
        "fault": judgement.fault,
        "fired": judgement.firing.value,
        "expected_failure": judgement.expected_failure,
        "results": judgement.results,
        "diagnosis": judgement.diagnosis,
        "measures": judgement.measures,
        "gpu": judgement.gpu,
        "seconds": judgement.seconds,
        "made": {name: text for name, text in judgement.made.items() if name != "replaced"},
        "replaced": judgement.replaced,
    }


def case_document_here(judgement: Judgement) -> dict[str, Any]:
    """Return a case with its folder, and the command that runs it again from here."""
    return case_document(judgement) | {"folder": judgement.folder, "again": rerun_command(judgement)}


def shown_result_data(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the data of each result as a report shows it: its first MAX_SHOWN_FINDINGS findings.

    `more` is how many others it has; absent if all are shown.
    """
    shown = []
    for result in results:
        data = as_data(replace(result, findings=result.findings[:MAX_SHOWN_FINDINGS]))
        if len(result.findings) > MAX_SHOWN_FINDINGS:
            data["more"] = len(result.findings) - MAX_SHOWN_FINDINGS
        shown.append(data)
    return shown
