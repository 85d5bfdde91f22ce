"""What a run took, in plain numbers: no check reads them, people compare them.

Bytes are those of the rank that has the most, for a layout is as good as its worst rank. Seconds are those of a step with
the probe in it, which copies gradients and parameters. They compare a case with itself, and do not show a trainer's speed.
"""

from __future__ import annotations

import statistics
from collections import Counter

from harness.core.evidence.records import RankEvidence
from harness.core.judge.traffic import axis_of, is_traffic
from harness.core.judge.trial import Trial

SECONDS, PEAK, HELD, MOVED = "seconds of a step", "peak bytes", "bytes held", "bytes moved"
PARAMETERS = "parameters held"  # a part of HELD
BLOCKED = "seconds blocked"
OUTSIDE_THE_PLAN = "no axis of the plan"


def measured(trial: Trial) -> dict[str, float]:
    """Return numbers by name, without those that were not seen. Bytes held are those between steps, bytes moved those of a step
    in forward and backward, in all and over each axis."""
    ranks = list(trial.ranks.values())
    found: dict[str, float] = {}
    if seconds := [max(each) for each in _seconds(ranks)]:
        found[SECONDS] = statistics.median(seconds)
    if peaks := [step.allocator.get("peak allocated", 0) for one in ranks for step in one.steps if step.allocator]:
        found[PEAK] = max(peaks)
    if held := [sum(step.memory.values()) for one in ranks for step in one.steps if step.memory]:
        found[HELD] = max(held)
        found[PARAMETERS] = max(step.memory.get("parameters", 0) for one in ranks for step in one.steps)
    return found | _moved(trial) | _blocked(trial)


def _seconds(ranks: list[RankEvidence]) -> list[list[float]]:
    """Return the seconds of all ranks by step; the first, in which groups are set up, only if there is no other."""
    by_step: dict[int, list[float]] = {}
    for one in ranks:
        for step in one.steps:
            if step.seconds is not None:
                by_step.setdefault(step.step, []).append(step.seconds)
    first = min(by_step, default=0)
    return [seconds for step, seconds in by_step.items() if step != first or len(by_step) == 1]


def _moved(trial: Trial) -> dict[str, float]:
    """Return bytes moved in all and over each axis; nothing where no rank has the step."""
    step = step_shown(trial)
    seen = [moved_by_axis(trial, one, step) for one in trial.ranks.values() if any(s.step == step for s in one.steps)]
    if not seen:
        return {}
    axes = dict.fromkeys(axis for moved in seen for axis in moved)
    by_axis = {f"{MOVED} over {axis}": float(max(moved[axis] for moved in seen)) for axis in axes}
    return {MOVED: float(max(moved.total() for moved in seen)), **by_axis}


def _blocked(trial: Trial) -> dict[str, float]:
    """Return the seconds of a step in which collectives blocked a rank's thread, over each axis: of the ranks' mean the step in
    the middle. Nothing on GPUs, where streams wait and threads do not."""
    calls = [call for one in trial.ranks.values() for call in one.collectives if is_traffic(call)]
    if any(call.blocked is None for call in calls) or any(_on_gpu(one) for one in trial.ranks.values()):
        return {}
    spent: dict[str, dict[int, float]] = {}
    for call in calls:
        by_step = spent.setdefault(axis_of(trial, call.ranks) or OUTSIDE_THE_PLAN, dict.fromkeys(trial.case.steps, 0.0))
        by_step[call.step] = by_step.get(call.step, 0.0) + (call.blocked or 0.0)
    first, ranks = trial.case.steps.start, len(trial.ranks)
    later = {axis: [took for step, took in of.items() if step > first] or [of[first]] for axis, of in spent.items()}
    return {f"{BLOCKED} over {axis}": statistics.median(of) / ranks for axis, of in later.items()}


def _on_gpu(evidence: RankEvidence) -> bool:
    return evidence.environment.get("device", "cpu") != "cpu"


def step_shown(trial: Trial) -> int:
    """The second, in which caches are filled, or the only one."""
    return min(trial.case.steps.start + 1, trial.case.steps.stop - 1)


def moved_by_axis(trial: Trial, evidence: RankEvidence, step: int) -> Counter[str]:
    """Bytes of a step that this rank moved in forward and backward, by the plan's axis."""
    moved: Counter[str] = Counter()
    for call in evidence.collectives:
        if call.step == step and is_traffic(call):
            moved[axis_of(trial, call.ranks) or OUTSIDE_THE_PLAN] += call.bytes
    return moved
