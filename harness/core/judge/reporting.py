"""Numbers that ranks report of their steps, and the steps in which a rank that reports at all must report one.

A trainer may report on some ranks only, and in every k-th step only (its adapter says so). It may not report in some of the
steps that are due and be silent in others: what was left out would not be seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from harness.core.evidence.step import StepEvidence
from harness.core.evidence.text import number_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.reference.record import ReferenceStep

Read = Callable[[StepEvidence], float | None]
Compare = Callable[[int, StepEvidence, ReferenceStep, float], tuple[float, Finding | None]]
"""(rank, step, reference, report) -> how far the report is off, and the finding if it is too far."""


def judge_reports(trial: Trial, check: str, quantity: str, read: Read, compare: Compare) -> Result:
    """Return the result of a check that compares every reported number, and lists each missing one as a finding.

    NOT APPLICABLE if no number was reported and none of the launch's steps is due. quantity: the number's name in
    findings, as "loss". read: returns the report of a step, None if it has none.
    """
    findings: list[Finding] = []
    examined = 0
    worst = 0.0
    for rank, step, reference in trial.steps_with_reference():
        reported = read(step)
        if reported is None:
            continue
        examined += 1
        difference, finding = compare(rank, step, reference, reported)
        worst = max(worst, difference)
        if finding:
            findings.append(finding)
    findings += missing_report_findings(trial, quantity, read)
    if not examined and not any(steps_due(trial, rank) for rank in trial.ranks):
        first_step = trial.case.steps[0]
        last_step = trial.case.steps[-1]
        interval = max(evidence.reports_every for evidence in trial.ranks.values())
        reason = f"this trainer reports every {interval} steps, and steps {first_step} to {last_step} have none"
        return not_applicable(check, reason)
    return verdict_of(check, findings, examined, largest=worst)


def relative_error(reported: float, expected: float) -> float:
    """Return |reported - expected| / |expected|. inf if `reported` is not finite, or if only `expected` is 0.

    Two zeros have no difference: a schedule may end at a rate of zero.
    """
    if not math.isfinite(reported):
        return math.inf
    if expected:
        return abs(reported - expected) / abs(expected)
    return 0.0 if reported == 0 else math.inf


def ratio_text(reported: float, expected: float) -> str:
    """Return a text of reported / expected; empty if that is not finite."""
    ratio = reported / expected if expected else math.nan
    return f"ratio {number_text(ratio, 10)}" if math.isfinite(ratio) else ""


def shortfall_of_largest(mean: float, largest: float | None) -> float:
    """Return how far the reported largest of some values is below their mean, relative to the mean.

    0 if the largest is at least the mean, as is right, or if it was not reported (None). inf if it is not finite.
    """
    if largest is None or largest >= mean:
        return 0.0
    return max(0.0, relative_error(largest, mean))


def steps_due(trial: Trial, rank: int) -> list[int]:
    """Return the steps in which a rank should report: requested, recorded, and divided by its `reports_every`."""
    evidence = trial.ranks[rank]
    requested = trial.case.steps
    return [step.step for step in evidence.steps if step.step % evidence.reports_every == 0 and step.step in requested]


def missing_report_findings(trial: Trial, quantity: str, read: Read) -> list[Finding]:
    """Return a finding for each due step of which a rank reports no number, though it reports one in another step.

    A rank that never reports the number has none.
    """
    findings = []
    for rank, evidence in sorted(trial.ranks.items()):
        reported_in = [step.step for step in evidence.steps if read(step) is not None]
        if not reported_in:
            continue
        for step in steps_due(trial, rank):
            if step not in reported_in:
                note = f"it reports one in step {reported_in[0]}"
                findings.append(
                    Finding.at(rank, "a number", None, step=step, quantity=f"reported {quantity}", note=note)
                )
    return findings
