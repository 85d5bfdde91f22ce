"""Each rank of a pipeline performed the actions of the requested schedule, in the order of that schedule.

Numbers cannot show it: whatever the order, the gradients are the same, only memory and waiting differ.
"""

from __future__ import annotations

from typing import Any

from harness.core.judge.finding import Finding
from harness.core.judge.result import Result, not_applicable, verdict_of
from harness.core.judge.trial import Trial
from harness.core.plan.stages import actions_of_rank

STAGE = "structure"
NEEDS = frozenset({"structure", "declared"})


def check(trial: Trial) -> Result:
    if trial.case.dims.pp == 1:
        return not_applicable("schedule", "no pipeline: pp 1")
    findings, examined = [], 0
    for rank, evidence in sorted(trial.ranks.items()):
        wanted = planned(trial, rank)
        for step in evidence.steps:
            examined += len(wanted)
            findings += _compare(rank, step.step, wanted, step.actions)
    return verdict_of("schedule", findings, examined)


def planned(trial: Trial, rank: int) -> tuple[str, ...]:
    """Return actions as torch writes them: stage, kind, microbatch. Accumulation repeats the schedule."""
    return tuple(map(str, actions_of_rank(trial.case, rank))) * trial.case.features.accumulation


def _compare(rank: int, step: int, wanted: tuple[str, ...], seen: tuple[str, ...]) -> list[Finding]:
    """The first place at which they part, with what comes next."""
    if wanted == seen:
        return []
    pairs = enumerate(zip(wanted, seen, strict=False))
    at = next((index for index, (one, other) in pairs if one != other), min(len(wanted), len(seen)))
    what: dict[str, Any] = {"step": step, "quantity": f"action {at}"}
    return [Finding.at(rank, _from(wanted, at), _from(seen, at), **what)]


def _from(actions: tuple[str, ...], at: int) -> str:
    some = " ".join(actions[at : at + 6]) + (" ..." if len(actions) > at + 6 else "")
    return f"{some or 'nothing more'} ({len(actions)} in all)"
