"""Losses of one model that differ: by no more than float32 rounds, or between ranks that were fed the same."""

from __future__ import annotations

from collections.abc import Iterator

from harness.diagnosis.differences import distance, loss_off, wrong_pairs
from harness.diagnosis.hypothesis import Broken, Fact, stated
from harness.diagnosis.words import where_text
from harness.judge.result import Cause
from harness.judge.trial import Trial

FLOAT32 = 1e-6  # relative to the largest


def rounding(trial: Trial, broken: Broken) -> Iterator[Fact]:
    """Of float64: all losses and the gradients of step 1 are off by less than float32 rounds."""
    wrong = wrong_pairs(trial, trial.first_step) if trial.case.exact and trial.first_step == 1 else []
    off = max((loss_off(trial, step) or 0.0 for step in trial.case.steps), default=0.0)
    if "gradients" not in broken or not wrong or off > FLOAT32:
        return
    largest = max(distance(trial, rank, fqn) for rank, fqn in wrong)
    if largest < FLOAT32:
        observed = f"gradients are off by {largest:.0e}"
        where = where_text(trial, wrong) + f", the loss by {off:.0e}" * bool(off)
        hint = f"no more than arithmetic in float32 rounds, requested {trial.case.training.dtype}"
        yield Fact(Cause("rounded", observed, where, hint=hint), ("gradients", "loss", "grad_norm", "reported_loss"))


def different_losses(trial: Trial, broken: Broken) -> Iterator[Fact]:
    if {"loss", "samples"} & set(broken) == {"loss"} and all(
        finding.rank is not None for finding in broken["loss"].findings
    ):
        first = broken["loss"].findings[0]
        yield stated(
            broken, "loss", "losses differ", f"ranks compute different losses from the same tokens: {first.where}"
        )
