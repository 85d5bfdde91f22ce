"""The trial of ranks that ran alone, what the checks say of it, and the cause where one is broken."""

from __future__ import annotations

import importlib.metadata
from dataclasses import dataclass

from harness import trainers
from harness.checks import OF_ALONE, all_checks, run_check
from harness.diagnosis import diagnose
from harness.diagnosis.costs import memory_kept, of_no_plan, of_two_runs, ranks_wait
from harness.diagnosis.features import odd_traces, other_actions, other_features
from harness.diagnosis.layout import other_layouts
from harness.diagnosis.processes import process_failed
from harness.diagnosis.units import kept_otherwise, other_units
from harness.judge.recorded import NO_REFERENCE
from harness.judge.result import Diagnosis, Result
from harness.judge.trial import Alone, Trial
from harness.plan.make_plan import make_plan
from harness.plan.observed_units import as_laid_out, claimed_units
from harness.preflight.launches import Flown
from harness.spec import traits
from harness.spec.case import Case

SUSPECTS = (other_layouts, other_features, other_units)
FACTS = (process_failed, odd_traces, other_actions, kept_otherwise, memory_kept, ranks_wait, of_two_runs, of_no_plan)
"""Hypotheses and facts that need no numbers."""


@dataclass(frozen=True)
class Verdicts:
    trial: Trial
    results: tuple[Result, ...]
    diagnosis: Diagnosis | None


def judged(case: Case, flown: Flown) -> Verdicts:
    trial = trial_of(case, flown)
    checks = {name: module for name, module in all_checks().items() if name in OF_ALONE}
    results = tuple(run_check(name, module.check, trial) for name, module in checks.items())
    return Verdicts(trial, results, diagnose(trial, results, SUSPECTS, FACTS, costly=()))


def trial_of(case: Case, flown: Flown) -> Trial:
    chosen = trainers.load(flown.run.trainer).traits(case)
    case = traits.settled(case, {"run": chosen})
    observed = None
    if chosen.fsdp_units == "observed" or case.features.fsdp_units == "observed":
        observed = {rank: claimed_units(evidence) for rank, evidence in flown.run.ranks.items()}
    plan = make_plan(
        case, as_laid_out(case, chosen, flown.run.ranks), observed, torch=importlib.metadata.version("torch")
    )
    return Trial(case, plan, flown.run, NO_REFERENCE, alone=Alone(flown.ranks, unable=flown.unable))
