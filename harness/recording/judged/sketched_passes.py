"""How often each pass of the first recording counts in the second one's gradients.

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
"""Weights that are told."""
Group = int | tuple[int, int]
"""A rank, a microbatch, or a rank's microbatch; all from 0."""


def counted_otherwise(
    one: Numbers, other: Numbers, step: int, bound: float
) -> tuple[Cause, Mapping[str, np.ndarray]] | None:
    """Return how passes count, and what sketches are then, by parameter; None where passes were not seen, or cannot be
    distinguished."""
    rows = one.passes.get(step, {}).get(0, ())
    fqns = [
        fqn for (at, kind, fqn) in one.whole if (at, kind) == (step, GRADIENT) and (step, GRADIENT, fqn) in other.whole
    ]
    added = _added(one, step, len(rows), fqns)
    if not added or BUCKETS * len(fqns) < TIMES * len(rows):
        return None
    lengths = np.repeat([one.whole[step, GRADIENT, fqn].length or 1.0 for fqn in fqns], BUCKETS)
    columns = np.stack([np.concatenate([of[fqn] for fqn in fqns]) for of in added], axis=1) / lengths[:, None]
    target = np.concatenate([other.whole[step, GRADIENT, fqn].sums for fqn in fqns]) / lengths
    counts = np.linalg.norm(columns, axis=0) > bound  # a pass without a label adds nothing
    if not np.isfinite(target).all() or np.linalg.matrix_rank(columns[:, counts]) < sum(counts):
        return None
    inverse = np.linalg.pinv(columns[:, counts])
    weights, close = inverse @ target, 2 * bound * float(np.abs(np.linalg.norm(inverse, axis=1)).max())
    every = np.ones(len(rows))
    every[counts] = np.where(np.abs(weights - weights.round()) <= close, weights.round() + 0.0, weights)
    if close > 0.1 or np.ptp(every[counts]) <= 2 * close:
        return None
    sums = {fqn: sum(weight * of[fqn] for weight, of in zip(every, added, strict=True)) for fqn in fqns}
    groups = {name: _groups(other, step, rows, name) for name in ("rank", "microbatch", "microbatch of each rank")}
    name = "sample" if all(len(of) == 1 for of in rows) else "pass of the first recording"
    return _cause([*_readings(every, counts, close, groups), (name, dict(enumerate(every)))], close), sums  # type: ignore


def _added(one: Numbers, step: int, passes: int, fqns: Sequence[str]) -> list[dict[str, np.ndarray]]:
    """Return what each pass added; nothing where not all of them were seen."""
    known = [one.after_pass.get((step, number), {}) for number in range(1, passes)]
    if passes < 2 or any(fqn not in of for of in known for fqn in fqns):
        return []
    whole = {fqn: one.whole[step, GRADIENT, fqn].sums for fqn in fqns}
    until = [{fqn: np.zeros(BUCKETS) for fqn in fqns}, *known, whole]
    return [{fqn: late[fqn] - early[fqn] for fqn in fqns} for early, late in zip(until, until[1:], strict=False)]


def _groups(other: Numbers, step: int, rows: Sequence[tuple[int, ...]], name: str) -> list[Group] | None:
    """Return of which group of the second recording each pass is; None where rows of one were fed to several. Ranks that are
    fed alike are one."""
    fed = other.passes.get(step, {})
    ranks = {fed[rank]: rank for rank in sorted(fed, reverse=True)}
    found: list[Group] = []
    for of in rows:
        at = {(rank, place) for parts, rank in ranks.items() for place, part in enumerate(parts) if {*of} & {*part}}
        some = {{"rank": rank, "microbatch": place}.get(name, (rank, place)) for rank, place in at}
        if len(some) != 1:
            return None
        found += some
    return found


Reading = tuple[str, dict[Group, float]]
"""What is one group, and the weight of each; infinite where it has no label that counts, of which any weight is right."""


def _readings(
    every: np.ndarray, counts: np.ndarray, close: float, groups: Mapping[str, list[Group] | None]
) -> Iterator[Reading]:
    """Yield the ways to group passes in which all of one group count alike."""
    for name, of in groups.items():
        if of is None or len({*of}) < 2:
            continue
        at = {
            group: [w for w, own, counted in zip(every, of, counts, strict=True) if own == group and counted]
            for group in of
        }
        if all(not weights or np.ptp(weights) <= 2 * close for weights in at.values()):
            yield name, {group: float(np.mean(weights)) if weights else math.inf for group, weights in at.items()}


def _cause(readings: Sequence[Reading], close: float) -> Cause:
    """Where the inverses of weights have the mean 1, each group's mean was taken, and the mean of these. The last reading has
    each pass of the first recording alone."""
    for name, weights in readings[:-1]:
        numbers = _finite(weights)
        share = sum(1 / number for number in numbers if number) / len(weights)
        lost = [group for group, weight in weights.items() if abs(weight) <= close]
        details = (("units", name), ("weights", tuple(numbers.tolist())))
        if lost and len(lost) < len(weights):
            which = ", ".join(_group_text(name, group) for group in sorted(lost))
            text = f"{name} {which} does not contribute to the gradient" if len(lost) == 1 else ""
            text = text or f"of {len(weights)} ({name}), {len(lost)} do not contribute to the gradient: {which}"
            return Cause("unequal contributions", text, hint=_weights_text(numbers), details=details)
        if not lost and abs(share - 1) <= close < np.var(numbers) / TIMES:
            text = f"the loss is averaged per {name}, and then over these: {len(weights)} of unequal size count alike"
            return Cause("averaged locally", text, hint=_weights_text(numbers), details=details)
    name, weights = readings[0]
    numbers = _finite(weights)
    text, details = f"gradients count unequally by {name}", (("units", name), ("weights", tuple(numbers.tolist())))
    return Cause("unequal contributions", text, hint=_weights_text(numbers), details=details)


def _finite(weights: Mapping[Group, float]) -> np.ndarray:
    return np.array([weight for weight in weights.values() if math.isfinite(weight)])


def _group_text(name: str, group: Group) -> str:
    if isinstance(group, tuple):
        return f"{group[1] + 1} of rank {group[0]}"
    return str(group + (name == "microbatch"))


def _weights_text(weights: np.ndarray) -> str:
    told = ", ".join(number_text(float(weight), 4) for weight in weights[:MOST])
    return f"weights {told}" + ", .." * (len(weights) > MOST)
