"""What is said of a recording, as data: in the form of a case's verdict.json, for tools/safeguard.py."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from harness.core.judge.result import Diagnosis, Result, verdict_of_all
from harness.core.report.as_data import as_data


def said_of(name: str, results: Sequence[Result], diagnosis: Diagnosis | None, odd: Iterable[str]) -> dict[str, Any]:
    """odd: the labels of what is odd without any layout."""
    return {
        "name": name,
        "verdict": verdict_of_all(results),
        "diagnosis": as_data(diagnosis),
        "results": as_data(results),
        "odd": list(dict.fromkeys(odd)),
    }
