"""The mean loss over all valid tokens of the step, recomputed from every rank's local losses, is the reference's."""

from __future__ import annotations

import math
from typing import Any

from harness.core.case.trainer_spec import TrainerSpec
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.losses import global_loss, losses
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.reporting import ratio_text
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
OF_GRADIENTS = True


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
            place: dict[str, Any] = {"step": step.step, "quantity": "loss", "note": ratio_text(observed, step.loss)}
            bound = bounds.of(bounds.loss[step.step])
            findings.append(Finding(**place, expected=step.loss, observed=observed, bound=bound))
        findings += _odd_peers(trial, step.step, bounds.loss[step.step])
    return verdict_of("loss", findings, len(trial.case.steps), largest=worst)


def _remedy(trial: Trial) -> str:
    """For who computes it by hand, in a kernel of his own or in compiled code."""
    trainer = TrainerSpec.parse(trial.run.trainer)
    where = trainer.name if trainer.is_file else f"the adapter of {trainer.name}"
    line = 'harness.adapter.note_loss(labels, loss, reduction="sum")'
    return (
        f"let {where} call `{line}` where it is computed, if not by torch's cross_entropy or nll_loss in plain Python"
    )


def _odd_peers(trial: Trial, step: int, bound: float) -> list[Finding]:
    """Ranks that computed another loss than the tp peer that received the same."""
    findings = []
    for rank in last_stage_ranks(trial):
        first = trial.plan.peers(rank, "tp")[0]
        if first == rank:
            continue
        wanted, seen = losses(trial, first, step), losses(trial, rank, step)
        place: dict[str, Any] = {"step": step, "quantity": "loss", "note": f"expected: tp peer {first}'s, same tokens"}
        if len(seen) != len(wanted):
            findings.append(Finding.at(rank, len(wanted), len(seen), **place, unit="losses"))
            continue
        for (loss, count), (other, other_count) in zip(wanted, seen, strict=True):
            if not abs(other - loss) <= bound * abs(loss) or count != other_count:
                if count != other_count:
                    findings.append(Finding.at(rank, count, other_count, **place, unit="tokens"))
                else:
                    findings.append(Finding.at(rank, loss, other, **place, bound=Bound(bound)))
    return findings


def _relative(observed: float, expected: float) -> float:
    return abs(observed - expected) / abs(expected) if math.isfinite(observed) else math.inf
