"""The judgement of a recording as data, in the form of a case's verdict.json, for tools/safeguard.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.core.judge.result import Diagnosis, Result, verdict_of_all
from harness.core.report.as_data import as_data


def said_of(name: str, results: Sequence[Result], diagnosis: Diagnosis | None, odd: Iterable[str]) -> dict[str, Any]:
    """Return the verdict, diagnosis and results of a recording as JSON values.

    odd: labels of anomalies, listed once each.
    """
    return {
        "name": name,
        "verdict": verdict_of_all(results),
        "diagnosis": as_data(diagnosis),
        "results": as_data(results),
        "odd": list(dict.fromkeys(odd)),
    }
