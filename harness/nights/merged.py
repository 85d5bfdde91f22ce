"""Several recorded runs as one: shards of several machines, each case once."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.report.outcome import Outcome
from harness.core.run.packing import parsed
from harness.core.run.verdicts import RecordedRun

ALIKE = ("device", "launcher", "torch", "commit", "sources", "adapter")
"""What all shards of a run have in common, with the trainer: verdicts of two versions are no verdict of either."""


def merged(runs: Sequence[RecordedRun]) -> list[Outcome]:
    """The outcome of each case in the last run that has one, in the order of the first. ValueError for runs of other things."""
    first, *rest = runs
    for run in rest:
        different = [name for name in ALIKE if (run.begins.get(name) or "") != (first.begins.get(name) or "")]
        if different := ["trainer"] * (run.trainer != first.trainer) + different:
            one, other = (of.begins.get(different[0]) or "unknown" for of in (first, run))
            raise ValueError(
                f"{first.file} and {run.file} are of another {different[0]} ({one}, {other}): show them one by one"
            )
    return list({name: one for run in _by_beginning(runs) for name, one in run.outcomes.items()}.values())


def _by_beginning(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    return sorted(runs, key=lambda run: run.run)


def problems(runs: Sequence[RecordedRun]) -> tuple[list[str], list[str]]:
    """What is not there though it should be, and what was there more than once."""
    done = {name for run in runs for name in run.outcomes}
    lost = [name for run in runs for name in run.missing if name not in done]
    shards = {run.begins.get("shard", "") for run in runs} - {""}
    there, counts = {parsed(shard)[0] for shard in shards}, {parsed(shard)[1] for shard in shards}
    lacking = [f"{name}: no verdict, its run was cut short" for name in dict.fromkeys(lost)]
    lacking += [
        f"shard {part}/{max(counts)} is not among these"
        for part in range(1, max(counts, default=0) + 1)
        if part not in there
    ]
    lacking += ["shards of different numbers of parts, which need not be all cases"] if len(counts) > 1 else []
    ended = [name for run in runs for name in (*run.outcomes, *run.twice)]
    again = sorted({name for name in ended if ended.count(name) > 1})
    return lacking, [f"{name}: ended {ended.count(name)} times, the last counts" for name in again]


def provenance(runs: Sequence[RecordedRun]) -> list[str]:
    """Return when and where each run began, and with which versions."""
    return [_provenance(run) for run in _by_beginning(runs)]


def _provenance(run: RecordedRun) -> str:
    begins, done = run.begins, len(run.outcomes)
    shard = f", shard {begins['shard']}" if begins.get("shard") else ""
    versions = f"torch {begins.get('torch') or 'unknown'}, commit {begins.get('commit') or 'unknown'}"
    return (
        f"{done} of {len(begins['cases'])} cases of {begins.get('began')} on {begins.get('machine')}{shard}; {versions}"
    )
