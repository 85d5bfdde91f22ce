"""Weights are changed when the optimizer is done: the reference goes on from what they then were."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from harness.checks import update
from harness.diagnosis.assume import another_reference
from harness.diagnosis.hypothesis import Broken, Fact, Hypothesis
from harness.diagnosis.words import finding_line, in_parameters, on_ranks
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.trial import Trial

Pair = tuple[int, str]  # rank, fqn


def changed_weights(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """What there was when the next step began, if it has the shape of what the optimizer left."""
    changes = update.changed(trial)
    if "update" not in broken or not (cause := _cause(trial, changes)) or "shape or dtype" in cause.observed:
        return
    held = {(rank, step.step): step.changed or {} for rank, step, _ in trial.steps()}

    def left(step: int, parameters: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        whole = {fqn: value.copy() for fqn, value in parameters.items()}
        for rank, fqn in changes.get(step, ()):
            if part := trial.slice_of(rank, fqn):
                target = take(whole[fqn].reshape(trial.plan.shapes[fqn]), part)
                target[...] = held[rank, step][fqn].reshape(target.shape)
        return whole

    yield Hypothesis(cause, lambda t: another_reference(t, left=left), 1, (finding_line("update", broken["update"]),))


def seen_changed(trial: Trial, broken: Broken) -> Iterator[Fact]:
    if "update" in broken and (cause := _cause(trial, update.changed(trial))):
        yield Fact(cause, ("update",), (finding_line("update", broken["update"]),))


def _cause(trial: Trial, changes: dict[int, list[Pair]]) -> Cause | None:
    step = next(iter(changes), None)
    if step is None:
        return None
    observed = f"weights are changed {update.until(trial, step)}, when the optimizer is done"
    how = _as_if(trial, step, changes[step])
    return Cause("weights changed", f"{observed}: {how}{_where(trial, changes[step])}")


def _as_if(trial: Trial, step: int, pairs: list[Pair]) -> str:
    """What was done to all of them, if it is something that is easily told."""
    records = {rank: next(s for s in trial.ranks[rank].steps if s.step == step) for rank, _ in pairs}
    both = [(records[rank].parameters[fqn], (records[rank].changed or {})[fqn]) for rank, fqn in pairs]
    if any(now.size != left.size or now.dtype != left.dtype for left, now in both):
        return "to another shape or dtype, "
    both = [(left.reshape(-1).astype(np.float64), now.reshape(-1).astype(np.float64)) for left, now in both]
    if not any(now.any() for _, now in both):
        return "to 0, "
    for dtype, bits in (("bfloat16", 8), ("float16", 11), ("float32", 24)):
        if all(_is_rounded(left, now, bits) for left, now in both):
            return f"rounded to {dtype}, "
    return ""


def _is_rounded(left: np.ndarray, now: np.ndarray, bits: int) -> bool:
    """To this many significant bits."""
    significant = np.frexp(now)[0] * 2.0**bits
    return bool(
        (significant == np.round(significant)).all() and (np.abs(now - left) <= np.abs(left) * 2.0**-bits).all()
    )


def _where(trial: Trial, pairs: list[Pair]) -> str:
    names = {fqn for _, fqn in pairs}
    fqns = [fqn for fqn in trial.plan.shapes if fqn in names]
    return in_parameters(trial, fqns) + on_ranks(trial, [rank for rank, _ in pairs])
