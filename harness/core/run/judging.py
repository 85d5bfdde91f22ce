"""Judging a folder of stored evidence. Starts nothing, writes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from harness.core.checks import judge
from harness.core.evidence.records import Run
from harness.core.judge.judgement import Judgement
from harness.core.judge.measured import undeclared_traits_text
from harness.core.judge.measures import measures_of
from harness.core.judge.result import Diagnosis, Firing, Result, Verdict
from harness.core.judge.stored_trial import load_trial
from harness.core.judge.trial import Trial


def judge_folder(folder: Path) -> Judgement:
    """Return the judgement of a case's stored evidence. It reads and computes; it starts nothing and writes nothing.

    Raises EvidenceError if the evidence is missing or cannot be read.
    """
    trial = load_trial(folder)
    with np.errstate(over="ignore", invalid="ignore"):  # a number that went wrong is a finding
        results = judge(trial)
        diagnosis = _diagnose_failures(trial, results)
    return Judgement(
        case=trial.case,
        folder=folder,
        results=results,
        diagnosis=diagnosis,
        seconds=sum(run.seconds for run in _all_runs(trial)),
        fault=trial.run.fault,
        firing=_firing(trial, folder),
        trainer=trial.run.trainer,
        made=trial.run.made,
        measures=measures_of(trial),
        gpu=_gpu_names(trial),
        observed=undeclared_traits_text(trial.traits),
    )


def _diagnose_failures(trial: Trial, results: Sequence[Result]) -> Diagnosis | None:
    """Return the diagnosis of a run; None if no check fails.

    Importing what diagnoses takes a tenth of a second, for which a run without a failing check need not wait."""
    if not any(result.verdict is Verdict.FAIL for result in results):
        return None
    from harness.core.causes import diagnose

    return diagnose(trial, results)


def _gpu_names(trial: Trial) -> str:
    """Return the names of the GPUs that ranks report they computed on; empty on CPU."""
    names = {evidence.environment.get("device", "cpu") for evidence in trial.ranks.values()} - {"cpu"}
    return ", ".join(sorted(names))


def _all_runs(trial: Trial) -> list[Run]:
    return [launched.run for launched in trial.launches] + ([trial.repeat] if trial.repeat else [])


def _firing(trial: Trial, folder: Path) -> Firing:
    """Return whether the planted fault's code ran on any rank, or that no fault was planted.

    A rank that died of it has left a file beside where its evidence would be.
    """
    if trial.run.fault is None:
        return Firing.NO_FAULT
    fired = (evidence.fault for launched in trial.launches for evidence in launched.ranks.values())
    return Firing.FIRED if any(fired) or any(folder.glob("*/ranks/*.fired")) else Firing.NOT_FIRED
