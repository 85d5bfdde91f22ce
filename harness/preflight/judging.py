"""The trial of ranks that ran alone, what the checks say of it, and the cause where one is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from harness import trainers
from harness.checks import judge
from harness.diagnosis import diagnose
from harness.diagnosis.facts import observed, process_failed
from harness.diagnosis.request import neighbours
from harness.diagnosis.structure_facts import facts
from harness.evidence.provided import alone
from harness.evidence.records import Exit, Run
from harness.judge.measured import measured
from harness.judge.recorded import NO_REFERENCE
from harness.judge.result import Diagnosis, Result
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.preflight.launches import Flown
from harness.spec import traits
from harness.spec.case import Case

SUSPECTS = (neighbours,)
FACTS = (process_failed, facts, observed)
"""Hypotheses and facts that need no numbers."""


@dataclass(frozen=True)
class Verdicts:
    trial: Trial
    results: tuple[Result, ...]
    diagnosis: Diagnosis | None


def judged(case: Case, flown: Flown) -> Verdicts:
    trial = trial_of(case, flown)
    results = judge(trial)
    return Verdicts(trial, results, diagnose(trial, results, SUSPECTS, FACTS, costly=()))


def trial_of(case: Case, flown: Flown) -> Trial:
    chosen = trainers.traits_of(trainers.load(flown.run.trainer), case)
    case = traits.settled(case, {"run": chosen})
    plan = make_plan(case, measured(case, chosen, flown.run))
    return Trial(case, plan, of_lone_ranks(flown.run, flown.ranks, flown.unable), NO_REFERENCE)


def of_lone_ranks(run: Run, ranks: Sequence[int], unable: Mapping[int, str]) -> Run:
    """The run of these ranks, each alone. unable: by rank, why it could not be run so, which is not the trainer's mistake."""
    exits = [Exit(one.rank, "unable", error=unable[one.rank]) if one.rank in unable else one for one in run.exits]
    return replace(run, exits=tuple(exits), chosen=tuple(sorted(ranks)), provided=alone(run.provided))
