"""Gradients that are added to those of the step before, as clipping left them or as they were."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from harness.diagnosis.assume import another_reference
from harness.diagnosis.differences import expected_gradient, first_wrong_step, seen_gradients, spans, wrong_pairs
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.judge.result import Cause
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.reference.distance import best_fit, relative_distance

Arrays = dict[str, np.ndarray]


def gradients_not_zeroed(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    step = first_wrong_step(trial) if "gradients" in broken else None
    if step is None or step == 1 or not _holds_the_one_before(trial, step):
        return
    held = f"those of step {step} hold step {step - 1}'s as well"
    limit = trial.case.training.max_norm
    for most in dict.fromkeys((limit, None)):
        for _, steps, more in spans(trial, step):
            when = f"before step {step} alone" if more else "between steps"
            cause, gradients = (
                Cause("gradients not zeroed", f"gradients are not zeroed {when}: {held}"),
                _adding(steps, most),
            )
            yield Hypothesis(cause, lambda t, by=gradients: another_reference(t, gradients=by), 1 + more)  # type: ignore[misc]


def _adding(steps: Sequence[int], limit: float | None) -> Callable[[int, Arrays], Arrays]:
    """In these steps what there was before as well. limit: the norm to which that was clipped in place."""
    left: Arrays = {}

    def gradients(step: int, own: Arrays) -> Arrays:
        total = {fqn: g + left[fqn] for fqn, g in own.items()} if step in steps else own
        norm = math.sqrt(sum(float(np.sum(np.square(g, dtype=np.float64))) for g in total.values()))
        left.update({fqn: (clip_coefficient(norm, limit) * g).astype(g.dtype) for fqn, g in total.items()})
        return total

    return gradients


def _holds_the_one_before(trial: Trial, step: int) -> bool:
    """Whether what is too much in a few wrong gradients is a multiple of those of the step before."""
    for rank, fqn in wrong_pairs(trial, step)[:4]:
        seen, own = seen_gradients(trial, rank, step)[fqn], expected_gradient(trial, rank, fqn, step)
        before = expected_gradient(trial, rank, fqn, step - 1)
        if own is None or before is None or seen.shape != own.shape or not np.any(before):
            return False
        rest = seen - own
        if relative_distance(rest, best_fit(rest, before) * before) > (1e-6 if trial.case.exact else 0.2):
            return False
    return bool(wrong_pairs(trial, step))
