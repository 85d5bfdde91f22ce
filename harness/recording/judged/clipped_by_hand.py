"""Gradients of which one recording's are seen before clipping, and the other's after it.

The recorder sees gradients before torch's functions clip them. A trainer that clips by its own code is seen as its optimizer
steps, when its gradients are clipped already. Clipping multiplies all of them by one factor, and never enlarges them.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from harness.recording.judged.judge_sketched import Numbers
from harness.recording.judged.sketch_distances import Bounds, apart
from harness.recording.sketches import GRADIENT, WEIGHTS


def unclipped(one: Numbers, other: Numbers, noise: Numbers | None = None) -> Numbers:
    """Return the second, in steps that torch's functions clip in one alone, with gradients divided by that factor.

    What the optimizer received is judged by its state and updates then. noise: the first, its weights altered by one rounding.
    """
    bounds, whole, factors = Bounds(one, noise), dict(other.whole), dict[int, float]()
    for step in sorted({*one.steps} & {*other.steps}):
        factor = _factor(one, other, bounds, step) if _is_judged(one, other, step) else None
        if factor is None:
            continue
        factors[step] = factor
        for key in (key for key in other.whole if key[:2] == (step, GRADIENT)):
            of = other.whole[key]
            held = {place: [(rank, sums / factor) for rank, sums in ranks] for place, ranks in of.replicas.items()}
            whole[key] = replace(of, sums=of.sums / factor, squares=of.squares / factor**2, replicas=held)
    return replace(other, whole=whole, rescaled=factors) if factors else other


def _is_judged(one: Numbers, other: Numbers, step: int) -> bool:
    """Whether torch's functions clip in one alone, and more than gradients shows the size of what the optimizer receives."""
    if bool(one.norms.get(step)) == bool(other.norms.get(step)):
        return False
    keys = {key for key in one.whole.keys() & other.whole.keys() if key[0] == step}
    updated = all(of.startswith("SGD(") for of in one.optimizers) and any(key[1] == WEIGHTS for key in keys)
    return updated or any(key[1] not in (GRADIENT, WEIGHTS) for key in keys)


def _factor(one: Numbers, other: Numbers, bounds: Bounds, step: int) -> float | None:
    """Return the factor between all gradients of a step; None where they have none, or have one that clipping cannot make."""
    keys = [key for key in one.whole.keys() & other.whole.keys() if key[:2] == (step, GRADIENT)]
    pairs = [(one.whole[key].sums, other.whole[key].sums, bounds.of(key)) for key in keys if one.whole[key].length]
    fits = [apart(mine, theirs)[1] for mine, theirs, _ in pairs]
    if not fits or not all(map(math.isfinite, fits)):
        return None
    factor, is_after = float(np.median(fits)), not other.norms.get(step)
    makes = 0 < factor < 1 if is_after else factor > 1
    if not makes or all(apart(mine, theirs)[0] <= bound for mine, theirs, bound in pairs):
        return None
    return factor if all(apart(factor * mine, theirs)[0] <= bound for mine, theirs, bound in pairs) else None
