"""Plain numbers of a run: memory, bytes moved, seconds. No check reads them, people compare them.

Bytes are those of the rank that has the most, for a layout is as good as its worst rank. Seconds are those of a step with
the probe in it, which copies gradients and parameters. They compare a case with itself, and do not show a trainer's speed.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter

from harness.core.evidence.records import Collective, RankEvidence
from harness.core.judge.traffic import axis_of, is_traffic
from harness.core.judge.trial import Trial

SECONDS = "seconds of a step"
PEAK = "peak bytes"
HELD = "bytes held"
MOVED = "bytes moved"
PARAMETERS = "parameters held"  # a part of HELD
BLOCKED = "seconds blocked"
OUTSIDE_THE_PLAN = "no axis of the plan"


def measures_of(trial: Trial) -> dict[str, float]:
    """Return a run's measures by their name above, for people to compare. A number that was not observed is left out.

    Bytes held are those between steps. Bytes moved are those of one step in forward and backward, in all and over each
    axis. Blocked seconds are given for each axis.
    """
    ranks = list(trial.ranks.values())
    steps = list(itertools.chain.from_iterable(evidence.steps for evidence in ranks))
    numbers: dict[str, float] = {}
    if slowest_seconds := [max(seconds) for seconds in _seconds_by_step(ranks)]:
        numbers[SECONDS] = statistics.median(slowest_seconds)
    if peaks := [step.allocator.get("peak allocated", 0) for step in steps if step.allocator]:
        numbers[PEAK] = max(peaks)
    if held_bytes := [sum(step.memory.values()) for step in steps if step.memory]:
        numbers[HELD] = max(held_bytes)
        numbers[PARAMETERS] = max(step.memory.get("parameters", 0) for step in steps)
    return numbers | _bytes_moved(trial) | _blocked_seconds(trial)


def _seconds_by_step(ranks: list[RankEvidence]) -> list[list[float]]:
    """Return, for each step, the seconds that each rank took. Empty if no rank recorded seconds.

    The first step is left out unless there is no other, because groups are set up in it.
    """
    by_step: dict[int, list[float]] = {}
    for evidence in ranks:
        for step in evidence.steps:
            if step.seconds is not None:
                by_step.setdefault(step.step, []).append(step.seconds)
    first = min(by_step, default=0)
    return [seconds for step, seconds in by_step.items() if step != first or len(by_step) == 1]


def _bytes_moved(trial: Trial) -> dict[str, float]:
    """Return the bytes that the busiest rank moved in the representative step, by measure: in all, and over each axis.

    The maximum is taken for each number alone, so axes may be of different ranks. Empty if no rank has the step on
    record.
    """
    shown_step = representative_step(trial)
    moved_by_rank: list[Counter[str]] = []
    for evidence in trial.ranks.values():
        if any(step.step == shown_step for step in evidence.steps):
            moved_by_rank.append(bytes_moved_by_axis(trial, evidence, shown_step))
    if not moved_by_rank:
        return {}
    numbers = {MOVED: float(max(moved.total() for moved in moved_by_rank))}
    for axis in dict.fromkeys(itertools.chain.from_iterable(moved_by_rank)):
        numbers[f"{MOVED} over {axis}"] = float(max(moved[axis] for moved in moved_by_rank))
    return numbers


def _blocked_seconds(trial: Trial) -> dict[str, float]:
    """Return, by measure, the seconds of a step in which collectives blocked a rank: mean of ranks, median of steps.

    There is one measure for each axis. The first step is left out unless there is no other. Empty if a call's time was
    not observed, or on GPUs, where streams wait and threads do not.
    """
    calls: list[Collective] = []
    for evidence in trial.ranks.values():
        calls += filter(is_traffic, evidence.collectives)
    if any(call.blocked is None for call in calls) or any(map(_on_gpu, trial.ranks.values())):
        return {}
    seconds_by_axis: dict[str, dict[int, float]] = {}
    for call in calls:
        axis = axis_of(trial, call.ranks) or OUTSIDE_THE_PLAN
        by_step = seconds_by_axis.setdefault(axis, dict.fromkeys(trial.case.steps, 0.0))
        by_step[call.step] = by_step.get(call.step, 0.0) + (call.blocked or 0.0)
    first_step = trial.case.steps.start
    numbers: dict[str, float] = {}
    for axis, by_step in seconds_by_axis.items():
        later_seconds = [seconds for step, seconds in by_step.items() if step > first_step]
        median_seconds = statistics.median(later_seconds or [by_step[first_step]])
        numbers[f"{BLOCKED} over {axis}"] = median_seconds / len(trial.ranks)
    return numbers


def _on_gpu(evidence: RankEvidence) -> bool:
    return evidence.environment.get("device", "cpu") != "cpu"


def representative_step(trial: Trial) -> int:
    """Return the number of the step whose bytes are shown: the second of the launch, or its only one.

    Caches are filled in the first.
    """
    return min(trial.case.steps.start + 1, trial.case.steps.stop - 1)


def bytes_moved_by_axis(trial: Trial, evidence: RankEvidence, step: int) -> Counter[str]:
    """Return the bytes that a rank moved in forward and backward of a step, by the plan's axis.

    Bytes over a group that is no axis of the plan count under OUTSIDE_THE_PLAN.
    """
    moved: Counter[str] = Counter()
    for call in evidence.collectives:
        if call.step == step and is_traffic(call):
            moved[axis_of(trial, call.ranks) or OUTSIDE_THE_PLAN] += call.bytes
    return moved
