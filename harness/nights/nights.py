"""A folder of nights: NIGHTS/DAY/verdicts.jsonl holds the runs of a day, culprits.jsonl beside it what broke or fixed cases.

The folder is small, because evidence lies elsewhere, and files in it only grow. It can be kept in a branch of git.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.evidence.reading import parse_json, read_bytes
from harness.core.evidence.store import EvidenceError
from harness.core.report import outcome as outcomes
from harness.core.run import verdicts
from harness.core.run.verdicts import RecordedRun
from harness.nights.history import Night

CULPRITS_FILE = "culprits.jsonl"


@dataclass(frozen=True)
class Culprit:
    """The result of one search between the commits of two nights, good and bad, whether or not a commit was found."""

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


def culprits_by_case(culprits: Iterable[Culprit]) -> Culprits:
    """Return the culprits by (case, run of the night in which it changed). The last one counts where two have the same key."""
    culprit_of: dict[tuple[str, str], Culprit] = {}
    for culprit in culprits:
        culprit_of |= {(case, culprit.run): culprit for case in culprit.cases}
    return culprit_of


def name_of_night(night: Night) -> str:
    """Return the name by which a culprit refers to the night: that of its first run."""
    return night.runs[0].run


def append_runs(nights: Path, runs: Sequence[RecordedRun], day: str) -> Path:
    """Append runs to NIGHTS/DAY/verdicts.jsonl, and return the folder NIGHTS/DAY.

    A run that the file already has with the same outcomes is not written again. Raises EvidenceError for a foreign
    file.
    """
    folder = nights / day
    file = folder / verdicts.VERDICTS_FILE
    kept_outcomes = {run.run: run.outcomes for run in verdicts.read_verdicts(file)[0]} if file.exists() else {}
    for run in runs:
        if kept_outcomes.get(run.run) != run.outcomes:
            lines = [{"run": run.run, "ended": outcomes.outcome_to_json(outcome)} for outcome in run.outcomes.values()]
            verdicts.append_lines(file, {"run": run.run, "begins": run.begins}, *lines)
    return folder


def append_culprits(folder: Path, culprits: Sequence[Culprit]) -> None:
    """Append culprits to culprits.jsonl in the folder of a day. Without culprits nothing is written."""
    if culprits:
        verdicts.append_lines(folder / CULPRITS_FILE, *map(dataclasses.asdict, culprits))


def read_culprits(folders: Sequence[Path]) -> Culprits:
    """Return the culprits of every culprits.jsonl below the folders, by (case, run). What is no folder is skipped.

    Raises EvidenceError for a line that is no culprit.
    """
    culprits: list[Culprit] = []
    for folder in folders:
        if folder.is_dir():
            for file in sorted(folder.rglob(CULPRITS_FILE)):
                culprits += _culprits_in_file(file)
    return culprits_by_case(culprits)


def _culprits_in_file(file: Path) -> list[Culprit]:
    """Return the culprits in one file, in its order. Raises EvidenceError for a line that is none."""
    return [_parse_culprit(line, file) for line in read_bytes(file).splitlines() if line]


def _parse_culprit(line: bytes, file: Path) -> Culprit:
    """Return the culprit that a JSON line holds. Raises EvidenceError, which names the file, if the line is none."""
    try:
        value = parse_json(line)
        return Culprit(**(value | {"cases": tuple(value["cases"])}))
    except (ValueError, TypeError, KeyError) as error:
        raise EvidenceError(f"{file}: not a line of what was searched for: {error}") from error
