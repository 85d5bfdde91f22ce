"""The mean loss over all valid tokens of the step, recomputed from every rank's local losses, is the reference's."""

from __future__ import annotations

import math
from typing import Any

from harness.core.case.trainer_spec import TrainerSpec
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.losses import global_loss, losses_of_rank
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.reporting import ratio_text
from harness.core.judge.result import Result, Verdict, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
OF_GRADIENTS = True


def check(trial: Trial) -> Result:
    """Compare the mean loss of every step with the reference's, and each rank's losses with its tp peer's.

    Raises NoBound. UNKNOWN if there is a step in which no rank's loss was observed, whatever was found before.
    """
    bounds = trial.bounds
    findings: list[Finding] = []
    worst = 0.0
    for step in map(trial.reference_step, trial.case.steps):
        observed = global_loss(trial, step.step)
        if observed is None:
            return Result(
                "loss", Verdict.UNKNOWN, note=f"step {step.step}: no rank's loss was seen; {_remedy_text(trial)}"
            )
        difference = _relative_difference(observed, step.loss)
        worst = max(worst, difference)
        if not difference <= bounds.loss[step.step]:
            subject: dict[str, Any] = {"step": step.step, "quantity": "loss", "note": ratio_text(observed, step.loss)}
            bound = bounds.finding_bound(bounds.loss[step.step])
            findings.append(Finding(**subject, expected=step.loss, observed=observed, bound=bound))
        findings += _differing_peer_findings(trial, step.step, bounds.loss[step.step])
    return verdict_of("loss", findings, len(trial.case.steps), largest=worst)


def _remedy_text(trial: Trial) -> str:
    """Return the call that the adapter needs if a trainer's loss is not seen.

    It is not seen if the trainer computes it by hand, in a kernel of its own or in compiled code.
    """
    trainer = TrainerSpec.parse(trial.run.trainer)
    caller = trainer.name if trainer.is_file else f"the adapter of {trainer.name}"
    line = 'harness.adapter.note_loss(labels, loss, reduction="sum")'
    return (
        f"let {caller} call `{line}` where it is computed, if not by torch's cross_entropy or nll_loss in plain Python"
    )


def _differing_peer_findings(trial: Trial, step: int, bound: float) -> list[Finding]:
    """Return a finding for each loss in which a rank differs from the first tp peer, which received the same tokens.

    bound: relative. A rank with another number of losses has one finding.
    """
    findings = []
    for rank in last_stage_ranks(trial):
        first = trial.plan.peers(rank, "tp")[0]
        if first == rank:
            continue
        wanted = losses_of_rank(trial, first, step)
        observed = losses_of_rank(trial, rank, step)
        subject: dict[str, Any] = {
            "step": step,
            "quantity": "loss",
            "note": f"expected: tp peer {first}'s, same tokens",
        }
        if len(observed) != len(wanted):
            findings.append(Finding.at(rank, len(wanted), len(observed), **subject, unit="losses"))
            continue
        for (loss, count), (other_loss, other_count) in zip(wanted, observed, strict=True):
            if not abs(other_loss - loss) <= bound * abs(loss) or count != other_count:
                if count != other_count:
                    findings.append(Finding.at(rank, count, other_count, **subject, unit="tokens"))
                else:
                    findings.append(Finding.at(rank, loss, other_loss, **subject, bound=Bound(bound)))
    return findings


def _relative_difference(observed: float, expected: float) -> float:
    """Return |observed - expected| / |expected|; inf if `observed` is not finite."""
    return abs(observed - expected) / abs(expected) if math.isfinite(observed) else math.inf
