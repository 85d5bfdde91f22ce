"""Weights are changed when the optimizer is done: the reference goes on from what they then were."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from harness.checks import update
from harness.diagnosis.assume import another_reference
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.weights import rounded_to
from harness.diagnosis.words import Pair, finding_line, where_text
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.trial import Trial


def changed_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """What there was when the next step began, if it has the shape of what the optimizer left."""
    changes = update.changed(trial)
    if "update" not in broken or not (cause := _cause(trial, changes)):
        return
    held = {(rank, step.step): step.changed or {} for rank, step, _ in trial.steps()}

    def left(step: int, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        whole = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in changes.get(step, ()):
            if part := trial.slice_of(rank, fqn):
                target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
                target[...] = held[rank, step][fqn].reshape(target.shape)
        return whole

    fits, lines = "shape or dtype" not in cause.observed, (finding_line("update", broken["update"]),)
    yield Hypothesis(cause, partial(another_reference, left=left) if fits else None, 1, lines, ("update",))


def _cause(trial: Trial, changes: dict[int, list[Pair]]) -> Cause | None:
    step = next(iter(changes), None)
    if step is None:
        return None
    observed = f"weights are changed {update.until(trial, step)}, when the optimizer is done"
    how = _as_if(trial, step, changes[step])
    return Cause("weights changed", f"{observed}: {how}{where_text(trial, changes[step])}")


def _as_if(trial: Trial, step: int, pairs: list[Pair]) -> str:
    """What was done to all of them, if it is something that is easily told."""
    records = {rank: next(s for s in trial.ranks[rank].steps if s.step == step) for rank, _ in pairs}
    both = [(records[rank].parameters[fqn], (records[rank].changed or {})[fqn]) for rank, fqn in pairs]
    if any(now.size != left.size or now.dtype != left.dtype for left, now in both):
        return "to another shape or dtype, "
    if not any(now.any() for _, now in both):
        return "to 0, "
    dtype = rounded_to(*((now.reshape(left.shape), left) for left, now in both))
    return f"rounded to {dtype}, " if dtype else ""
