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
    """Compare the pipeline actions of each rank and step with the requested schedule's.

    NOT APPLICABLE without a pipeline.
    """
    if trial.case.dims.pp == 1:
        return not_applicable("schedule", "no pipeline: pp 1")
    findings: list[Finding] = []
    examined = 0
    for rank, evidence in sorted(trial.ranks.items()):
        wanted = planned_actions(trial, rank)
        for step in evidence.steps:
            examined += len(wanted)
            findings += _compare_actions(rank, step.step, wanted, step.actions)
    return verdict_of("schedule", findings, examined)


def planned_actions(trial: Trial, rank: int) -> tuple[str, ...]:
    """Return the actions of a rank in a step, in order, as torch writes them: stage, kind, microbatch ("0F1").

    Gradient accumulation repeats the schedule.
    """
    return tuple(map(str, actions_of_rank(trial.case, rank))) * trial.case.features.accumulation


def _compare_actions(rank: int, step: int, wanted: tuple[str, ...], performed: tuple[str, ...]) -> list[Finding]:
    """Return a finding of the first action that differs or is missing, with those that come next.

    Empty if all are the same.
    """
    if wanted == performed:
        return []
    index = min(len(wanted), len(performed))
    for position, (wanted_action, seen_action) in enumerate(zip(wanted, performed, strict=False)):
        if wanted_action != seen_action:
            index = position
            break
    subject: dict[str, Any] = {"step": step, "quantity": f"action {index}"}
    return [Finding.at(rank, _next_actions_text(wanted, index), _next_actions_text(performed, index), **subject)]


def _next_actions_text(actions: tuple[str, ...], index: int) -> str:
    """Return a text of up to six actions from this index on, "nothing more" behind the end, and their number in all."""
    next_actions = " ".join(actions[index : index + 6]) + (" ..." if len(actions) > index + 6 else "")
    return f"{next_actions or 'nothing more'} ({len(actions)} in all)"
