"""The loss that a rank reports is the reference's: a claim, judged apart from the training itself.

A rank that reports none claims nothing; if none does, though its trainer is one that reports losses, that is UNKNOWN. One
that reports it in some of the steps that are due and not in others is a finding.
"""

from __future__ import annotations

from harness.evidence.records import StepEvidence
from harness.judge.reporting import judge_reports, relative
from harness.judge.result import Finding, Result, not_applicable
from harness.judge.trial import Trial
from harness.reference.record import ReferenceStep

STAGE = "numbers"


def check(trial: Trial) -> Result:
    if trial.ranks and not any("loss" in evidence.reports for evidence in trial.ranks.values()):
        return not_applicable("reported_loss", "this trainer reports none; the loss itself is judged by the law loss")
    bounds, assumed = trial.bounds, trial.reports.get("reported_loss")

    def compare(rank: int, step: StepEvidence, reference: ReferenceStep, shown: float) -> tuple[float, Finding | None]:
        wanted = reference.loss if assumed is None else assumed(rank, step.step)
        difference = relative(shown, wanted)
        if difference <= bounds.loss[step.step]:
            return difference, None
        found = f"{shown!r} (off by {difference:.2e})"
        bound = bounds.text(bounds.loss[step.step])
        return difference, Finding.at(rank, repr(wanted), found, bound, step=step.step)

    return judge_reports(trial, "reported_loss", "loss", lambda step: step.reported_loss, compare)
