"""The trial of ranks that ran alone, the checks' results on it, and the cause where one fails."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness.clusters.launches import LoneRun
from harness.core import trainers
from harness.core.case import traits
from harness.core.case.case import Case
from harness.core.causes import diagnose
from harness.core.causes.facts import facts_of_table, process_failed
from harness.core.causes.request import neighbours
from harness.core.causes.structure_facts import facts_of_structure
from harness.core.checks import judge
from harness.core.evidence.provided import provided_by_single_ranks
from harness.core.evidence.records import Exit, Run
from harness.core.judge.measured import with_measured_traits
from harness.core.judge.result import Diagnosis, Result
from harness.core.judge.trial import Trial
from harness.core.plan.make_plan import make_plan
from harness.recording.judged.recorded import NO_REFERENCE

SUSPECTS = (neighbours,)
FACTS = (process_failed, facts_of_structure, facts_of_table)
"""Hypotheses and facts that need no numbers."""


@dataclass(frozen=True)
class Verdicts:
    """The judgement of ranks that ran alone."""

    trial: Trial
    """What was judged."""
    results: tuple[Result, ...]
    """The result of each check."""
    diagnosis: Diagnosis | None
    """The cause of what fails; None if nothing does, or no cause is known."""


def judge_lone_ranks(case: Case, flown: LoneRun) -> Verdicts:
    """Return the results of the checks on ranks that ran alone, and the cause of what fails."""
    trial = trial_of_lone_ranks(case, flown)
    results = judge(trial)
    return Verdicts(trial, results, diagnose(trial, results, SUSPECTS, FACTS, costly=()))


def trial_of_lone_ranks(case: Case, flown: LoneRun) -> Trial:
    """Return the trial of ranks that ran alone, with the plan of the case as its trainer chose. It has no reference."""
    chosen = trainers.traits_of(trainers.load_adapter(flown.run.trainer), case)
    case = traits.with_trainer_choices(case, {"run": chosen})
    plan = make_plan(case, with_measured_traits(case, chosen, flown.run))
    return Trial(case, plan, run_of_lone_ranks(flown.run, flown.ranks, flown.unable_reasons), NO_REFERENCE)


def run_of_lone_ranks(run: Run, ranks: Sequence[int], unable: Mapping[int, str]) -> Run:
    """Return the run with only these ranks chosen, each alone, and an exit "unable" for ranks in `unable`.

    unable: by rank, why it could not be run alone, which is not the trainer's mistake.
    """
    exits = [Exit(exit.rank, "unable", error=unable[exit.rank]) if exit.rank in unable else exit for exit in run.exits]
    return replace(
        run, exits=tuple(exits), chosen=tuple(sorted(ranks)), provided=provided_by_single_ranks(run.provided)
    )
