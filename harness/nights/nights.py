"""A folder of nights: NIGHTS/DAY/verdicts.jsonl holds the runs of a day, culprits.jsonl beside it what broke or fixed cases.

It is small, for evidence lies elsewhere, and only grows: one keeps it in a branch of git.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.evidence.reading import json_of, read_bytes
from harness.core.evidence.store import EvidenceError
from harness.core.report import outcome as outcomes
from harness.core.run import verdicts
from harness.core.run.verdicts import RecordedRun
from harness.nights.history import Night

CULPRITS = "culprits.jsonl"


@dataclass(frozen=True)
class Culprit:
    """What one search between the commits of two nights, good and bad, found."""

    cases: tuple[str, ...]  # those that share the cause; only the first was run
    run: str  # the night that they changed in
    cause: str
    good: str
    bad: str
    fixed: bool = False  # what fixed them was looked for
    name: str = ""  # the commit, its day and subject; empty if it was not found
    before: str = ""  # the last commit without it
    problem: str = ""  # why it was not found
    report: str = ""  # of the search
    commit: str = ""
    """The commit of `name`, as it is searched for."""
    before_commit: str = ""
    """The commit of `before`."""

    def __str__(self) -> str:
        return self.name or f"not found: {self.problem}"


Culprits = Mapping[tuple[str, str], Culprit]
"""(case, the night in which it changed) -> culprit."""


def by_case(found: Iterable[Culprit]) -> Culprits:
    return {(case, one.run): one for one in found for case in one.cases}


def of_night(night: Night) -> str:
    """What a culprit calls it: its first run."""
    return night.runs[0].run


def keep(nights: Path, runs: Sequence[RecordedRun], day: str) -> Path:
    """Adds these runs, where they are not there yet, to those of that day. Answers its folder. Raises EvidenceError."""
    folder = nights / day
    file = folder / verdicts.FILE
    there = {run.run: run.outcomes for run in verdicts.read(file)[0]} if file.exists() else {}
    for run in runs:
        if there.get(run.run) != run.outcomes:
            ended = [{"run": run.run, "ended": outcomes.to_json(one)} for one in run.outcomes.values()]
            verdicts.append(file, {"run": run.run, "begins": run.begins}, *ended)
    return folder


def keep_culprits(folder: Path, found: Sequence[Culprit]) -> None:
    if found:
        verdicts.append(folder / CULPRITS, *map(dataclasses.asdict, found))


def culprits_in(folders: Sequence[Path]) -> Culprits:
    """Return the culprits of all culprits.jsonl below folders. Raises EvidenceError for a line that is none."""
    files = [file for folder in folders if folder.is_dir() for file in sorted(folder.rglob(CULPRITS))]
    return by_case(_culprit(line, file) for file in files for line in read_bytes(file).splitlines() if line)


def _culprit(line: bytes, file: Path) -> Culprit:
    try:
        value = json_of(line)
        return Culprit(**(value | {"cases": tuple(value["cases"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise EvidenceError(f"{file}: not a line of what was searched for: {error}") from error
