"""The gradient norm that a rank reports is the global norm of the reference's gradients before clipping.

A rank that reports none claims nothing; if none does, though its trainer is one that reports norms, that is UNKNOWN. One
that reports it in some of the steps that are due and not in others is a finding.
"""

from __future__ import annotations

from typing import Any

from harness.core.evidence.step import StepEvidence
from harness.core.judge.finding import Finding
from harness.core.judge.reporting import judge_reports, relative_error
from harness.core.judge.result import Result, not_applicable
from harness.core.judge.trial import Trial
from harness.reference.record import ReferenceStep

STAGE = "numbers"
NEEDS = frozenset({"reference", "values"})
OF_GRADIENTS = True


def check(trial: Trial) -> Result:
    """Compare each reported gradient norm with the reference's, or with what a hypothesis assumes. Raises NoBound.

    NOT APPLICABLE if the trainer reports none.
    """
    if trial.ranks and not any("grad_norm" in evidence.reports for evidence in trial.ranks.values()):
        return not_applicable("grad_norm", "this trainer reports none; clipping by it is judged by the check update")
    bounds = trial.bounds
    assumed = trial.assumption.reports.get("grad_norm")

    def compare(rank: int, step: StepEvidence, reference: ReferenceStep, shown: float) -> tuple[float, Finding | None]:
        """Return (relative difference of a reported norm, the finding if it is beyond the bound, else None)."""
        wanted = reference.grad_norm if assumed is None else assumed(rank, step.step)
        difference = relative_error(shown, wanted)
        if difference <= bounds.grad_norm[step.step]:
            return difference, None
        bound = bounds.finding_bound(bounds.grad_norm[step.step])
        ratio = f"ratio {shown / wanted:.6g}"
        subject: dict[str, Any] = {"step": step.step, "quantity": "gradient norm", "note": ratio}
        return difference, Finding.at(rank, wanted, shown, bound=bound, **subject)

    return judge_reports(trial, "grad_norm", "gradient norm", lambda step: step.grad_norm, compare)
