"""A history of runs as nights: the shards of one night are one, and nights follow each other in time.

Only runs of one trainer on one kind of device, started by one launcher, are compared.
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
from harness.core.run.packing import parse_shard
from harness.core.run.verdicts import RecordedRun
from harness.nights.merged import find_problems, merge_outcomes

KEYS_THAT_MUST_AGREE = ("device", "launcher", "torch", "commit", "sources")
"""Values that all shards of one night have in common."""


def read_runs(folders: Sequence[Path]) -> tuple[list[RecordedRun], list[str]]:
    """Return all recorded runs, each once, in the order of beginning, and a sentence for each line that cannot be read.

    folders: a file is read itself; below a folder each verdicts.jsonl is read. Raises EvidenceError if there is no run.
    """
    files: list[Path] = []
    for folder in folders:
        if folder.is_file():
            files.append(folder)
        else:
            files += sorted(folder.rglob(verdicts.VERDICTS_FILE))
    runs: dict[str, RecordedRun] = {}
    unread: list[str] = []
    for file in dict.fromkeys(files):
        runs_of_file, problems_of_file = verdicts.read_verdicts(file)
        runs |= {run.run: run for run in runs_of_file}
        unread += problems_of_file
    if not runs:
        where = ", ".join(map(str, folders))
        raise EvidenceError(f"{where}: no run is recorded there; `harness matrix` records one in its --out")
    return sorted(runs.values(), key=lambda run: run.run), unread


@dataclass(frozen=True)
class Night:
    """A run of the matrix, or the shards of one run. `runs` has one entry or more."""

    runs: tuple[RecordedRun, ...]

    def recorded_value(self, key: str) -> str:
        """Return a value of the first run's beginning, such as "torch" or "commit". Empty if it was not recorded.

        Runs of one night agree in the values that are compared.
        """
        return str(self.runs[0].begins.get(key) or "")

    @functools.cached_property
    def outcomes(self) -> dict[str, Outcome]:
        """Return the outcome of each case, by the case's name."""
        return {outcome.case: outcome for outcome in merge_outcomes(self.runs)}

    @property
    def lacking_verdicts(self) -> list[str]:
        """Return a sentence for each case or shard of the night without a verdict. Empty if nothing is lacking."""
        return find_problems(self.runs)[0]

    def request_digest(self, case: str) -> str:
        """Return the digest of the case's definition that was run in this night. Empty if no run has the case."""
        return next((run.begins["cases"][case] for run in self.runs if case in run.begins["cases"]), "")

    def conditions_of(self, case: str) -> tuple[str, ...] | None:
        """Return the recorded values that decide a case's verdict.

        Two nights with equal values ran the same sources on the same device. The values are commit, sources, torch,
        device, GPU and the digest of the request. The commit is empty for our own trainer, whose sources the digest
        covers. None if sources or commit are not recorded, or the commit was changed ("-dirty"). The night must have an
        outcome of the case.
        """
        is_own_trainer = TrainerSpec.parse(self.recorded_value("trainer")).name == "llama3" and not self.recorded_value(
            "trainer"
        ).count("@")
        if not self.recorded_value("sources") or (
            not is_own_trainer
            and (not self.recorded_value("commit") or self.recorded_value("commit").endswith("-dirty"))
        ):
            return None
        commit = "" if is_own_trainer else self.recorded_value("commit")
        gpu = self.outcomes[case].gpu
        return (
            commit,
            *(self.recorded_value(key) for key in ("sources", "torch", "device")),
            gpu,
            self.request_digest(case),
        )

    def __str__(self) -> str:
        commit = self.recorded_value("commit") or "unknown"
        return f"{self.recorded_value('began')}, commit {commit}, torch {self.recorded_value('torch') or 'unknown'}"


def group_nights(runs: Sequence[RecordedRun]) -> dict[tuple[str, str, str], list[Night]]:
    """Return the nights, by (trainer's name, device, launcher), in the order of the runs. Sources of a trainer may differ.

    Consecutive runs that are different shards of one run become one night.
    """
    nights_by_kind: dict[tuple[str, str, str], list[Night]] = {}
    for run in runs:
        nights = nights_by_kind.setdefault(comparison_key(run), [])
        if nights and _is_shard_of(run, nights[-1]):
            nights[-1] = Night((*nights[-1].runs, run))
        else:
            nights.append(Night((run,)))
    return nights_by_kind


def comparison_key(run: RecordedRun) -> tuple[str, str, str]:
    """Return what runs must have in common to be compared: the trainer's name, device, launcher."""
    begins = run.begins
    return TrainerSpec.parse(run.trainer).name, begins.get("device", ""), begins.get("launcher", "")


def _is_shard_of(run: RecordedRun, night: Night) -> bool:
    """Return whether the run is a further shard of the night's run: same trainer and versions, same number of shards, a
    new number.

    False if the run, or one of the night's, was not a shard.
    """
    shards = [shard_run.begins.get("shard", "") for shard_run in night.runs]
    shard = run.begins.get("shard", "")
    first = night.runs[0]
    is_other = run.trainer != first.trainer or any(
        run.begins.get(key) != first.begins.get(key) for key in KEYS_THAT_MUST_AGREE
    )
    if not shard or not all(shards) or is_other:
        return False
    return shard not in shards and parse_shard(shard)[1] == parse_shard(shards[0])[1]
