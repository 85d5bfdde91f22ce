"""The learning rate that a rank reports for a step is the recipe's, and the one that its optimizer used in that step.

It may be reported in float32. A trainer that reports none claims nothing; one that does in some of the steps that are
due and not in others is a finding.
"""

from __future__ import annotations

from typing import Any

from harness.core.evidence.step import StepEvidence
from harness.core.judge.finding import Bound, Finding
from harness.core.judge.reporting import judge_reports, relative_error
from harness.core.judge.result import Result, not_applicable
from harness.core.judge.tolerance import UNIT_ROUNDOFF
from harness.core.judge.trial import Trial
from harness.reference.record import ReferenceStep

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
FLOAT32_TOLERANCE = 2 * UNIT_ROUNDOFF["float32"]


def check(trial: Trial) -> Result:
    """Compare each reported learning rate with the recipe's and with the optimizer's.

    NOT APPLICABLE if the trainer reports none, or if it keeps its own schedule (training.rates).
    """
    if trial.case.training.rates is not None:
        return not_applicable(
            "reported_rate", "the trainer keeps its own schedule (training.rates), which is not under test"
        )
    is_shown = any(step.reported_lr is not None for _, step, _ in trial.steps_with_reference())
    if not is_shown and not any("lr" in evidence.reports for evidence in trial.ranks.values()):
        return not_applicable(
            "reported_rate", "this trainer reports none; the optimizer's is judged by the check update"
        )
    assumed = trial.assumption.reports.get("reported_rate")

    def compare(rank: int, step: StepEvidence, reference: ReferenceStep, shown: float) -> tuple[float, Finding | None]:
        """Return (relative difference of a reported rate, the finding if it is beyond the tolerance, else None)."""
        if assumed is not None:
            return _compare_rate(rank, step.step, shown, [assumed(rank, step.step)], "")
        optimizer_note = f"the optimizer took {step.lr!r}" if step.lr is not None else ""
        wanted = [reference.lr] + ([step.lr] if step.lr is not None else [])
        return _compare_rate(rank, step.step, shown, wanted, optimizer_note)

    return judge_reports(trial, "reported_rate", "learning rate", lambda step: step.reported_lr, compare)


def _compare_rate(rank: int, step: int, shown: float, wanted: list[float], note: str) -> tuple[float, Finding | None]:
    """Return (the largest relative difference from these rates, the finding if it is too large, else None)."""
    difference = max(relative_error(shown, rate) for rate in wanted)
    if difference <= FLOAT32_TOLERANCE:
        return difference, None
    subject: dict[str, Any] = {"step": step, "quantity": "reported learning rate", "note": note}
    return difference, Finding.at(rank, wanted[0], shown, bound=Bound(FLOAT32_TOLERANCE), **subject)
