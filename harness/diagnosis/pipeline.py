"""A pipeline did other things than its schedule prescribes: another schedule, other microbatches, actions left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from harness.checks.schedule import planned
from harness.diagnosis.words import Broken, finding_line, rank_words
from harness.judge.result import Diagnosis, one_cause
from harness.judge.trial import Trial
from harness.plan.stages import actions_of_rank
from harness.spec import schedule
from harness.spec.case import Case
from harness.spec.features import LOOPED

SCHEDULES = ("GPipe", "1F1B", *LOOPED)


def wrong_schedule(trial: Trial, broken: Broken) -> Diagnosis | None:
    if "schedule" not in broken:
        return None
    lines = (finding_line("schedule", broken["schedule"]),)
    asked = trial.case
    for case in _others(asked):
        if all(_done(trial, rank) == _planned(case, rank) for rank in trial.ranks):
            return one_cause(_in_words(asked, case), lines)
    idle = [rank for rank in trial.ranks if not _done(trial, rank)]
    if idle:
        return one_cause(
            f"no pipeline ran on {rank_words(idle)}, schedule {asked.features.schedule} is requested", lines
        )
    return one_cause(
        _left_out(trial) or f"the pipeline's order is not that of {asked.features.schedule}: {lines[0][1]}", lines
    )


def _others(case: Case) -> Iterator[Case]:
    """The case with another schedule, another number of microbatches, or both."""
    least, most = 1, case.training.global_batch
    for number in (case.microbatches, *range(least, most + 1)):
        for name in SCHEDULES:
            chunks = case.stages_per_rank
            if schedule.refusal(name, case.dims.pp, chunks, number) is None:
                features = replace(case.features, schedule=name, microbatches=number, stages_per_rank=chunks)
                yield replace(case, features=features)


def _planned(case: Case, rank: int) -> tuple[str, ...]:
    return tuple(map(str, actions_of_rank(case, rank))) * case.features.accumulation


def _done(trial: Trial, rank: int) -> tuple[str, ...]:
    return trial.ranks[rank].steps[0].actions


def _in_words(asked: Case, ran: Case) -> str:
    other = ran.features.schedule != asked.features.schedule
    found = [f"schedule {ran.features.schedule} ran, {asked.features.schedule} is requested"] if other else []
    if ran.microbatches != asked.microbatches:
        found.append(f"{ran.microbatches} microbatches went through the pipeline, {asked.microbatches} are requested")
    return "; ".join(found)


def _left_out(trial: Trial) -> str | None:
    """Actions that no rank performed, or that were performed more than once."""
    for rank in sorted(trial.ranks):
        lacking = [action for action in planned(trial, rank) if action not in _done(trial, rank)]
        if lacking:
            return f"rank {rank} left out {len(lacking)} actions of its schedule ({' '.join(lacking[:4])})"
    return None
