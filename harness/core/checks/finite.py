"""Parameters are finite numbers, before the first step and after every step seen."""

from __future__ import annotations

from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, verdict_of
from harness.core.judge.trial import Trial

STAGE = "numbers"
NEEDS = frozenset({"contents"})


def check(trial: Trial) -> Result:
    findings = [
        Finding.at(
            one.rank, "finite numbers", "NaN or infinity", step=step, kind="parameter", name=name, quantity="value"
        )
        for one in trial.glances
        for step, names in sorted(one.not_finite.items())
        for name in names
    ]
    return verdict_of("finite", findings, sum(len(one.contents) for one in trial.glances))
