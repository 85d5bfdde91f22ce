"""What ranks report of their steps, and in which steps a rank that reports at all owes a number.

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


def judge_reports(trial: Trial, check: str, what: str, read: Read, compare: Compare) -> Result:
    """Every number reported, and every one that is lacking. what: "loss"."""
    findings, examined, worst = [], 0, 0.0
    for rank, step, reference in trial.steps():
        reported = read(step)
        if reported is None:
            continue
        examined += 1
        difference, finding = compare(rank, step, reference, reported)
        worst = max(worst, difference)
        findings += [finding] if finding else []
    findings += silences(trial, what, read)
    if not examined and not any(due(trial, rank) for rank in trial.ranks):
        first, last = trial.case.steps[0], trial.case.steps[-1]
        every = max(evidence.reports_every for evidence in trial.ranks.values())
        return not_applicable(check, f"this trainer reports every {every} steps, and steps {first} to {last} have none")
    return verdict_of(check, findings, examined, largest=worst)


def relative(shown: float, wanted: float) -> float:
    """0 / 0 is no difference: a schedule may end at a rate of zero."""
    if not math.isfinite(shown):
        return math.inf
    return abs(shown - wanted) / abs(wanted) if wanted else (0.0 if shown == 0 else math.inf)


def ratio_text(shown: float, wanted: float) -> str:
    """Return how many times what is wanted is shown; nothing where that is no number."""
    ratio = shown / wanted if wanted else math.nan
    return f"ratio {number_text(ratio, 10)}" if math.isfinite(ratio) else ""


def below(mean: float, largest: float | None) -> float:
    """Return how far a mean is above the largest of its values, relative to that; 0 if it is not, or none is shown."""
    return max(0.0, relative(largest, mean)) if largest is not None and not largest >= mean else 0.0


def due(trial: Trial, rank: int) -> list[int]:
    """The requested steps that a rank that reports at all must report."""
    evidence, requested = trial.ranks[rank], trial.case.steps
    return [step.step for step in evidence.steps if step.step % evidence.reports_every == 0 and step.step in requested]


def silences(trial: Trial, what: str, read: Read) -> list[Finding]:
    """Steps that are due and of which a rank says nothing, though it does of others."""
    findings = []
    for rank, evidence in sorted(trial.ranks.items()):
        reported_in = [step.step for step in evidence.steps if read(step) is not None]
        for step in due(trial, rank) if reported_in else ():
            if step not in reported_in:
                note = f"it reports one in step {reported_in[0]}"
                findings.append(Finding.at(rank, "a number", None, step=step, quantity=f"reported {what}", note=note))
    return findings
