"""Weights with which the passes of the first recording count in the second one's gradients.

Where one process accumulates, its recording has the gradient after each pass, and so what each pass adds. The second
recording's gradient is then a sum of these, each so many times. The rows that ranks were fed say whose they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from harness.core.evidence.text import number_text
from harness.core.judge.result import Cause
from harness.recording.judged.judge_sketched import Numbers
from harness.recording.sketches import BUCKETS, GRADIENT

TIMES = 4
"""Numbers that each weight is found by, at least."""
MOST = 8
"""Weights that are listed."""
Group = int | tuple[int, int]
"""A rank, a microbatch, or a rank's microbatch; all from 0."""
Reading = tuple[str, dict[Group, float]]
"""What is one group, and the weight of each; infinite where it has no label that counts, of which any weight is right."""


def weights_of_passes(
    baseline: Numbers, candidate: Numbers, step: int, bound: float
) -> tuple[Cause, Mapping[str, np.ndarray]] | None:
    """Return the cause, with the weight of each pass, and the gradients' sketches with these weights, by fqn.

    None where passes were not seen or cannot be distinguished, or all weights are equal. A pass without a label adds
    nothing, and has weight 1. bound: the largest relative distance of a gradient that is no mistake.
    """
    rows = baseline.passes.get(step, {}).get(0, ())
    fqns = _parameters_with_gradient(baseline, candidate, step)
    parts = _parts_of_passes(baseline, step, len(rows), fqns)
    if not parts or BUCKETS * len(fqns) < TIMES * len(rows):
        return None
    lengths = np.repeat([baseline.whole[step, GRADIENT, fqn].length or 1.0 for fqn in fqns], BUCKETS)
    columns = np.stack([_concatenated_sketches(part, fqns) for part in parts], axis=1) / lengths[:, None]
    target = np.concatenate([candidate.whole[step, GRADIENT, fqn].sums for fqn in fqns]) / lengths
    counts = np.linalg.norm(columns, axis=0) > bound  # a pass without a label adds nothing
    if not np.isfinite(target).all() or np.linalg.matrix_rank(columns[:, counts]) < sum(counts):
        return None
    inverse = np.linalg.pinv(columns[:, counts])
    close = 2 * bound * float(np.abs(np.linalg.norm(inverse, axis=1)).max())
    fitted = inverse @ target
    weights = np.ones(len(rows))
    weights[counts] = np.where(np.abs(fitted - fitted.round()) <= close, fitted.round() + 0.0, fitted)
    if close > 0.1 or np.ptp(weights[counts]) <= 2 * close:
        return None
    sums = {}
    for fqn in fqns:
        sums[fqn] = weights @ np.stack([part[fqn] for part in parts])
    readings = [
        *_groupings_with_equal_weights(candidate, step, rows, weights, counts, close),
        _reading_by_pass(rows, weights),
    ]
    return _cause(readings, close), sums


def _parameters_with_gradient(baseline: Numbers, candidate: Numbers, step: int) -> list[str]:
    """Return the fqns of which both recordings have a gradient in this step."""
    keys = [key for key in baseline.whole if key[:2] == (step, GRADIENT)]
    return [key[2] for key in keys if key in candidate.whole]


def _concatenated_sketches(sketches: Mapping[str, np.ndarray], fqns: Sequence[str]) -> np.ndarray:
    return np.concatenate([sketches[fqn] for fqn in fqns])


def _parts_of_passes(baseline: Numbers, step: int, passes: int, fqns: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """Return for each pass what it added to the gradient, by fqn.

    Empty for a single pass, or where not all passes were seen. passes: number of passes of rank 0 of the first
    recording.
    """
    known = [baseline.after_pass.get((step, number), {}) for number in range(1, passes)]
    if passes < 2:
        return []
    for sums in known:
        if any(fqn not in sums for fqn in fqns):
            return []
    whole = {fqn: baseline.whole[step, GRADIENT, fqn].sums for fqn in fqns}
    accumulated = [{fqn: np.zeros(BUCKETS) for fqn in fqns}, *known, whole]
    parts = []
    for before, after in zip(accumulated, accumulated[1:], strict=False):
        parts.append({fqn: after[fqn] - before[fqn] for fqn in fqns})
    return parts


# ---- whose passes they are


def _groupings_with_equal_weights(
    candidate: Numbers,
    step: int,
    rows: Sequence[tuple[int, ...]],
    weights: np.ndarray,
    counts: np.ndarray,
    close: float,
) -> Iterator[Reading]:
    """Yield the ways to group passes by rank or microbatch of the second recording in which all passes of a group count
    alike.

    A way with fewer than two groups, or with a pass in several groups, is left out.
    """
    for name in ("rank", "microbatch", "microbatch of each rank"):
        groups = _groups(candidate, step, rows, name)
        if groups is None or len({*groups}) < 2:
            continue
        by_group: dict[Group, list[float]] = {group: [] for group in groups}
        for group, weight, counted in zip(groups, weights, counts, strict=True):
            if counted:
                by_group[group].append(weight)
        if all(not alike or np.ptp(alike) <= 2 * close for alike in by_group.values()):
            means = {group: float(np.mean(alike)) if alike else math.inf for group, alike in by_group.items()}
            yield name, means


def _reading_by_pass(rows: Sequence[tuple[int, ...]], weights: np.ndarray) -> Reading:
    """Return the reading in which each pass of the first recording is a group, numbered from 0."""
    name = "sample" if all(len(row) == 1 for row in rows) else "pass of the first recording"
    return name, {number: float(weight) for number, weight in enumerate(weights)}


def _groups(candidate: Numbers, step: int, rows: Sequence[tuple[int, ...]], name: str) -> list[Group] | None:
    """Return for each pass its group of the second recording.

    None where the rows of a pass were fed to no group, or to several. Ranks that are fed alike count as the lowest of
    them. name: "rank", "microbatch", or any other for a rank's microbatch.
    """
    received = candidate.passes.get(step, {})
    ranks = {received[rank]: rank for rank in sorted(received, reverse=True)}
    groups: list[Group] = []
    for row in rows:
        receivers: set[Group] = set()
        for passes, rank in ranks.items():
            numbers = [number for number, fed in enumerate(passes) if {*row} & {*fed}]
            receivers.update({"rank": rank, "microbatch": number}.get(name, (rank, number)) for number in numbers)
        if len(receivers) != 1:
            return None
        groups += receivers
    return groups


# ---- in words


def _cause(readings: Sequence[Reading], close: float) -> Cause:
    """Return the cause of the first reading that has lost groups, or a mean of means; else unequal weights of the first
    reading.

    Where the inverses of weights have the mean 1, each group's mean was taken, and the mean of these. The last reading
    has each pass of the first recording alone, and is no such evidence. Precondition: there is a reading.
    """
    for name, weights in readings[:-1]:
        numbers = _finite_weights(weights)
        share = sum(1 / number for number in numbers if number) / len(weights)
        lost = sorted(group for group, weight in weights.items() if abs(weight) <= close)
        details = (("units", name), ("weights", tuple(numbers.tolist())))
        if lost and len(lost) < len(weights):
            text = _lost_text(name, lost, len(weights))
            return Cause("unequal contributions", text, hint=_weights_text(numbers), details=details)
        if not lost and abs(share - 1) <= close < np.var(numbers) / TIMES:
            text = f"the loss is averaged per {name}, and then over these: {len(weights)} of unequal size count alike"
            return Cause("averaged locally", text, hint=_weights_text(numbers), details=details)
    name, weights = readings[0]
    numbers = _finite_weights(weights)
    details = (("units", name), ("weights", tuple(numbers.tolist())))
    text = f"gradients count unequally by {name}"
    return Cause("unequal contributions", text, hint=_weights_text(numbers), details=details)


def _lost_text(name: str, lost: Sequence[Group], groups: int) -> str:
    """Return which groups do not contribute to the gradient, in words. groups: number of all groups."""
    which = ", ".join(_group_text(name, group) for group in lost)
    if len(lost) == 1:
        return f"{name} {which} does not contribute to the gradient"
    return f"of {groups} ({name}), {len(lost)} do not contribute to the gradient: {which}"


def _finite_weights(weights: Mapping[Group, float]) -> np.ndarray:
    return np.array([weight for weight in weights.values() if math.isfinite(weight)])


def _group_text(name: str, group: Group) -> str:
    """Return the number of a group in words: ranks and passes count from 0, microbatches from 1."""
    if isinstance(group, tuple):
        return f"{group[1] + 1} of rank {group[0]}"
    return str(group + (name == "microbatch"))


def _weights_text(weights: np.ndarray) -> str:
    listed = ", ".join(number_text(float(weight), 4) for weight in weights[:MOST])
    return f"weights {listed}, .." if len(weights) > MOST else f"weights {listed}"
