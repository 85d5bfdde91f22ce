"""Earlier runs: all that verdicts.jsonl files below a folder remember."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from harness.evidence.store import EvidenceError
from harness.run import verdicts
from harness.run.verdicts import RecordedRun


def runs_in(folders: Sequence[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Of files, and of all verdicts.jsonl below folders, in the order of beginning, each run once; and a sentence for each line
    that cannot be read. EvidenceError where there is none."""
    files = [
        file for folder in folders for file in ([folder] if folder.is_file() else sorted(folder.rglob(verdicts.FILE)))
    ]
    runs: dict[str, RecordedRun] = {}
    unread: list[str] = []
    for file in dict.fromkeys(files):
        found, problems = verdicts.read(file)
        runs |= {run.run: run for run in found}
        unread += problems
    if not runs:
        raise EvidenceError(
            f"{', '.join(map(str, folders))}: no run is recorded there; `harness matrix` records one in its --out"
        )
    return sorted(runs.values(), key=lambda run: run.run), unread
