"""Several recorded runs as one: shards of several machines, each case once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.core.report.outcome import Outcome
from harness.core.run.packing import parse_shard
from harness.core.run.verdicts import RecordedRun

KEYS_THAT_MUST_AGREE = ("device", "launcher", "torch", "commit", "sources", "adapter")
"""Values that all shards of a run have in common, with the trainer: verdicts of two versions are no verdict of either."""


def merge_outcomes(runs: Sequence[RecordedRun]) -> list[Outcome]:
    """Return one outcome a case: that of the last run that has the case. Cases are in the order in which they first occur.

    Needs one run or more. Raises ValueError if trainers, or values of KEYS_THAT_MUST_AGREE, differ.
    """
    first, *rest = runs
    for run in rest:
        different = [
            name for name in KEYS_THAT_MUST_AGREE if (run.begins.get(name) or "") != (first.begins.get(name) or "")
        ]
        if run.trainer != first.trainer:
            different.insert(0, "trainer")
        if different:
            values = ", ".join(str(each_run.begins.get(different[0]) or "unknown") for each_run in (first, run))
            raise ValueError(
                f"{first.file} and {run.file} are of another {different[0]} ({values}): show them one by one"
            )
    outcomes: dict[str, Outcome] = {}
    for run in _in_order_of_beginning(runs):
        outcomes |= run.outcomes
    return list(outcomes.values())


def _in_order_of_beginning(runs: Sequence[RecordedRun]) -> list[RecordedRun]:
    """Return the runs in the order in which they began."""
    return sorted(runs, key=lambda run: run.run)


def find_problems(runs: Sequence[RecordedRun]) -> tuple[list[str], list[str]]:
    """Return two lists of sentences: cases and shards without a verdict, and cases that ended more than once."""
    missing: dict[str, None] = {}
    ended: Counter[str] = Counter()
    for run in runs:
        missing |= dict.fromkeys(run.missing_cases)
        ended.update([*run.outcomes, *run.ended_twice])
    lacking = [f"{name}: no verdict, its run was cut short" for name in missing if name not in ended]
    lacking += _lacking_shards(runs)
    return lacking, [f"{name}: ended {ended[name]} times, the last counts" for name in sorted(ended) if ended[name] > 1]


def _lacking_shards(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a sentence for each shard that no run has, and one if shards are of different numbers of parts.

    Empty without shards.
    """
    shards = {run.begins.get("shard", "") for run in runs} - {""}
    present = {parse_shard(shard)[0] for shard in shards}
    counts = {parse_shard(shard)[1] for shard in shards}
    lacking = [
        f"shard {part}/{max(counts)} is not among these"
        for part in range(1, max(counts, default=0) + 1)
        if part not in present
    ]
    if len(counts) > 1:
        lacking.append("shards of different numbers of parts, which need not be all cases")
    return lacking


def provenance_lines(runs: Sequence[RecordedRun]) -> list[str]:
    """Return a line for each run, in the order of beginning: cases done, when and where it began, torch and commit."""
    return [_provenance_line(run) for run in _in_order_of_beginning(runs)]


def _provenance_line(run: RecordedRun) -> str:
    """Return the line on one run: "DONE of ALL cases of TIME on MACHINE", its shard if it is one, torch and commit."""
    begins = run.begins
    done = len(run.outcomes)
    shard = f", shard {begins['shard']}" if begins.get("shard") else ""
    versions = f"torch {begins.get('torch') or 'unknown'}, commit {begins.get('commit') or 'unknown'}"
    return (
        f"{done} of {len(begins['cases'])} cases of {begins.get('began')} on {begins.get('machine')}{shard}; {versions}"
    )
