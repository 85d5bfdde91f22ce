"""The loss that a rank reports is the reference's: a claim, judged separately from the training itself.

A largest loss that is reported beside it, of any parts of the batch, is not below it: no mean is above all that it is made of.

A rank that reports none claims nothing; if none does, though its trainer is one that reports losses, that is UNKNOWN. One
that reports it in some of the steps that are due and not in others is a finding.
"""

from __future__ import annotations

from typing import Any

from harness.core.evidence.step import StepEvidence
from harness.core.judge.finding import Bound, Finding, Limit
from harness.core.judge.reporting import judge_reports, ratio_text, relative_error, shortfall_of_largest
from harness.core.judge.result import Result, not_applicable
from harness.core.judge.tolerance import UNIT_ROUNDOFF
from harness.core.judge.trial import Trial
from harness.reference.record import ReferenceStep

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
OF_GRADIENTS = True
FLOAT32_TOLERANCE = 2 * UNIT_ROUNDOFF["float32"]
"""A largest loss may be shown in float32."""


def check(trial: Trial) -> Result:
    """Compare each reported loss with the reference's, or with what a hypothesis assumes. Raises NoBound.

    NOT APPLICABLE if the trainer reports none.
    """
    if trial.ranks and not any("loss" in evidence.reports for evidence in trial.ranks.values()):
        return not_applicable("reported_loss", "this trainer reports none; the loss itself is judged by the check loss")
    bounds = trial.bounds
    assumed = trial.assumption.reports.get("reported_loss")

    def compare(rank: int, step: StepEvidence, reference: ReferenceStep, shown: float) -> tuple[float, Finding | None]:
        """Return (relative difference of a reported loss, its finding or that of the largest loss, else None)."""
        wanted = reference.loss if assumed is None else assumed(rank, step.step)
        difference = relative_error(shown, wanted)
        if difference <= bounds.loss[step.step]:
            return difference, _largest_loss_finding(rank, step, shown)
        subject: dict[str, Any] = {"step": step.step, "quantity": "reported loss", "note": ratio_text(shown, wanted)}
        return difference, Finding.at(
            rank, wanted, shown, bound=bounds.finding_bound(bounds.loss[step.step]), **subject
        )

    return judge_reports(trial, "reported_loss", "loss", lambda step: step.reported_loss, compare)


def _largest_loss_finding(rank: int, step: StepEvidence, mean: float) -> Finding | None:
    """Return a finding if the reported largest loss of a step is below the reported mean.

    None if it is not, or is not reported.
    """
    if shortfall_of_largest(mean, step.reported_largest) <= FLOAT32_TOLERANCE:
        return None
    subject: dict[str, Any] = {
        "step": step.step,
        "quantity": "reported largest loss",
        "note": "at least the mean that it reports",
    }
    return Finding.at(rank, Limit(least=mean), step.reported_largest, bound=Bound(FLOAT32_TOLERANCE), **subject)
