"""Nights made of literal outcomes, and what a series of them is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from harness.core.report.outcome import Outcome
from harness.core.run.verdicts import RecordedRun
from harness.nights.history import Night, group_nights


def run(number: int, *done: Outcome, **begins: Any) -> RecordedRun:
    """The night of that number."""
    usual = {"trainer": "torchtitan@/titan", "device": "cpu", "launcher": "local", "torch": "2.13.0", "sources": "aa"}
    said = {"began": f"night {number}", "commit": f"c{number}", "cases": {one.case: "" for one in done}} | usual
    return RecordedRun(f"{number:03}", Path("verdicts.jsonl"), said | begins, {one.case: one for one in done})


def nights(*runs: RecordedRun) -> list[Night]:
    (found,) = group_nights(runs).values()
    return found
