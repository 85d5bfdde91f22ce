"""Many runs as nights: shards of one night together, and what each case was from night to night.

Only runs of one trainer on one kind of device, started by one launcher, are put in a row.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.store import EvidenceError
from harness.core.report.outcome import Outcome
from harness.core.run import verdicts
from harness.core.run.packing import parsed
from harness.core.run.verdicts import RecordedRun
from harness.nights.merged import merged, problems

ALIKE = ("device", "launcher", "torch", "commit", "sources")
"""What shards of one night have in common."""


def runs_in(folders: Sequence[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Return the runs in files, and in all verdicts.jsonl below folders, in the order of beginning, each once. Also return a
    sentence for each line that cannot be read. Raises EvidenceError if there is no run."""
    files = [
        file for folder in folders for file in ([folder] if folder.is_file() else sorted(folder.rglob(verdicts.FILE)))
    ]
    runs: dict[str, RecordedRun] = {}
    unread: list[str] = []
    for file in dict.fromkeys(files):
        found, problems_of_file = verdicts.read(file)
        runs |= {run.run: run for run in found}
        unread += problems_of_file
    if not runs:
        where = ", ".join(map(str, folders))
        raise EvidenceError(f"{where}: no run is recorded there; `harness matrix` records one in its --out")
    return sorted(runs.values(), key=lambda run: run.run), unread


@dataclass(frozen=True)
class Night:
    """runs: one, or the shards of one."""

    runs: tuple[RecordedRun, ...]

    def of(self, key: str) -> str:
        """What all its runs began with; empty where that was not recorded."""
        return str(self.runs[0].begins.get(key) or "")

    @functools.cached_property
    def outcomes(self) -> dict[str, Outcome]:
        return {one.case: one for one in merged(self.runs)}

    @property
    def lacking(self) -> list[str]:
        return problems(self.runs)[0]

    def requested(self, case: str) -> str:
        """A digest of what the case was."""
        return next((run.begins["cases"][case] for run in self.runs if case in run.begins["cases"]), "")

    def sources_of(self, case: str) -> tuple[str, ...] | None:
        """All that decides a verdict, as far as it is recorded: nights in which it is equal ran the same. None where it is
        not known: a commit that is not recorded, or sources that were changed since it."""
        own = TrainerSpec.parse(self.of("trainer")).name == "llama3" and not self.of("trainer").count("@")
        if not self.of("sources") or (not own and (not self.of("commit") or self.of("commit").endswith("-dirty"))):
            return None
        commit = "" if own else self.of("commit")
        gpu = self.outcomes[case].gpu
        return (commit, *(self.of(key) for key in ("sources", "torch", "device")), gpu, self.requested(case))

    def __str__(self) -> str:
        commit = self.of("commit") or "unknown"
        return f"{self.of('began')}, commit {commit}, torch {self.of('torch') or 'unknown'}"


def series(runs: Sequence[RecordedRun]) -> dict[tuple[str, str, str], list[Night]]:
    """Return the nights in their order, by trainer (of whatever source), device and launcher."""
    found: dict[tuple[str, str, str], list[Night]] = {}
    for run in runs:
        nights = found.setdefault(kind(run), [])
        if nights and _is_shard_of(run, nights[-1]):
            nights[-1] = Night((*nights[-1].runs, run))
        else:
            nights.append(Night((run,)))
    return found


def kind(run: RecordedRun) -> tuple[str, str, str]:
    """What runs must have in common to be compared: the trainer's name, device, launcher."""
    begins = run.begins
    return TrainerSpec.parse(run.trainer).name, begins.get("device", ""), begins.get("launcher", "")


def _is_shard_of(run: RecordedRun, night: Night) -> bool:
    """Whether it is another part of the same run."""
    shards = [other.begins.get("shard", "") for other in night.runs]
    mine = run.begins.get("shard", "")
    first = night.runs[0]
    other = run.trainer != first.trainer or any(run.begins.get(key) != first.begins.get(key) for key in ALIKE)
    if not mine or not all(shards) or other:
        return False
    return mine not in shards and parsed(mine)[1] == parsed(shards[0])[1]
