"""The same case run twice gives the same bytes: local losses, gradients and parameters of every step on every rank."""

from __future__ import annotations

from typing import Any

from harness.core.evidence.records import Run
from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, Verdict, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.judge.twice import step_differences

STAGE = "numbers"
NEEDS = frozenset({"values"})
DIFFERING_RESULTS = "results that differ from the first run"


def check(trial: Trial) -> Result:
    """Compare the repeat with the first run, step by step on each rank.

    NOT APPLICABLE if the case requests one run. UNKNOWN if the repeat's evidence is missing, or a rank of it did not
    end well.
    """
    if trial.case.runs < 2:
        return not_applicable("determinism", "the case requests one run (runs: 2 repeats it)")
    if trial.repeat is None or set(trial.repeat.ranks) != set(trial.ranks) or _has_failed_rank(trial.repeat):
        return Result("determinism", Verdict.UNKNOWN, note="the repeat left no complete evidence")
    findings: list[Finding] = []
    examined = 0
    for rank, evidence in sorted(trial.ranks.items()):
        for first, second in zip(evidence.steps, trial.repeat.ranks[rank].steps, strict=True):
            examined += 1
            if names := [f"{quantity} of {name}" for quantity, name in step_differences(first, second)]:
                subject: dict[str, Any] = {
                    "step": first.step,
                    "quantity": DIFFERING_RESULTS,
                    "note": ", ".join(names[:3]),
                }
                findings.append(Finding.at(rank, 0, len(names), **subject))
    return verdict_of("determinism", findings, examined)


def _has_failed_rank(run: Run) -> bool:
    """Return whether a rank's exit record is not "ok"."""
    return any(exit.how != "ok" for exit in run.exits)
