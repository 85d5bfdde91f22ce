"""The mean loss over all valid tokens of the step, recomputed from every rank's local losses, is the reference's."""

from __future__ import annotations

import math

from harness.judge.losses import global_loss, losses
from harness.judge.result import Finding, Result, Verdict, verdict_of
from harness.judge.trial import Trial
from harness.spec.trainer_spec import TrainerSpec

STAGE = "numbers"


def check(trial: Trial) -> Result:
    bounds = trial.bounds
    findings, worst = [], 0.0
    for step in map(trial.reference_step, trial.case.steps):
        observed = global_loss(trial, step.step)
        if observed is None:
            return Result("loss", Verdict.UNKNOWN, note=f"step {step.step}: no rank's loss was seen; {_remedy(trial)}")
        difference = _relative(observed, step.loss)
        worst = max(worst, difference)
        if not difference <= bounds.loss[step.step]:
            found = f"{observed!r} (off by {difference:.2e})"
            findings.append(Finding(f"step {step.step}", repr(step.loss), found, bounds.text(bounds.loss[step.step])))
        findings += _odd_peers(trial, step.step, bounds.loss[step.step])
    return verdict_of("loss", findings, len(trial.case.steps), f"largest difference {worst:.1e}")


def _remedy(trial: Trial) -> str:
    """For who computes it by hand, in a kernel of his own or in compiled code."""
    trainer = TrainerSpec.parse(trial.run.trainer)
    where = trainer.name if trainer.is_file else f"the adapter of {trainer.name}"
    line = 'harness.probe.losses.note_loss(labels, loss, reduction="sum")'
    return (
        f"let {where} call `{line}` where it is computed, if not by torch's cross_entropy or nll_loss in plain Python"
    )


def _odd_peers(trial: Trial, step: int, bound: float) -> list[Finding]:
    """Ranks that computed another loss than the tp peer that received the same."""
    findings = []
    for rank in trial.last_stages():
        first = trial.plan.peers(rank, "tp")[0]
        if first == rank:
            continue
        wanted, seen = losses(trial, first, step), losses(trial, rank, step)
        if len(seen) != len(wanted):
            expected = f"tp peer {first}'s for the same tokens: {len(wanted)} losses"
            findings.append(Finding.at(rank, expected, str(len(seen)), step=step))
            continue
        for (loss, count), (other, other_count) in zip(wanted, seen, strict=True):
            if not abs(other - loss) <= bound * abs(loss) or count != other_count:
                expected = f"tp peer {first}'s for the same tokens: {loss!r} over {count}"
                found = f"{other!r} over {other_count}"
                findings.append(Finding.at(rank, expected, found, f"{bound:.1e}", step=step))
    return findings


def _relative(observed: float, expected: float) -> float:
    return abs(observed - expected) / abs(expected) if math.isfinite(observed) else math.inf
