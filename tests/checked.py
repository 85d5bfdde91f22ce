"""What one check finds in a trial, and trials with one thing altered: what several tests of checks use."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from literal import (
    cause_of,
    judged,
    with_step,
)

from harness.diagnosis import diagnose
from harness.judge import tolerance
from harness.judge.result import Finding, Verdict
from harness.judge.trial import Trial

EMBEDDING, NORM, WQ = "tok_embeddings.weight", "norm.weight", "layers.0.attention.wq.weight"


def findings(check: str, trial) -> tuple[Finding, ...]:
    """Those of a check that must be broken."""
    result = judged(check, trial)
    assert result.verdict == Verdict.FAIL, result
    return result.findings


def bounds_of(trial) -> tolerance.Bounds:
    return tolerance.bounds(trial.case, trial.reference)


def with_loss(trial, rank: int, step: int, change):
    microbatches = trial.ranks[rank].steps[step - 1].microbatches
    changed = tuple(replace(m, loss_sum=change(m.loss_sum)) for m in microbatches)
    return with_step(trial, rank, step, microbatches=changed)


def found(trial: Trial) -> list[Finding]:
    return list(judged("features", trial).findings)


def cause(trial: Trial) -> str:
    named = diagnose(trial, [judged("features", trial)])
    return cause_of(named) if named else ""


def with_activity(trial: Trial, rank: int, step: int, **changes: Any) -> Trial:
    record = trial.ranks[rank].steps[step - 1]
    return with_step(trial, rank, step, activity=replace(record.activity, **changes))
