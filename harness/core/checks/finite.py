"""Parameters are finite numbers, before the first step and after every step seen."""

from __future__ import annotations

from typing import Any

from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"contents"})


def check(trial: Trial) -> Result:
    """Judge the digests of every rank. Examined are the steps that each has on record, before the first included."""
    findings: list[Finding] = []
    for summary in trial.rank_summaries:
        for step, names in sorted(summary.contents.not_finite.items()):
            subject: dict[str, Any] = {"step": step, "kind": "parameter", "quantity": "value"}
            for name in names:
                findings.append(Finding.at(summary.rank, "finite numbers", "NaN or infinity", name=name, **subject))
    return verdict_of("finite", findings, sum(len(summary.contents.by_step) for summary in trial.rank_summaries))
