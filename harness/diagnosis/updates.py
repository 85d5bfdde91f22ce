"""Gradients are right, what the optimizer made of them is not: clipping, learning rate, decay, averages, or no step at all.

Suspects are tried by judging the same evidence by the law `update` under a recipe that has the mistake.
"""

from __future__ import annotations

import numpy as np

from harness.checks import update
from harness.diagnosis.differences import wrong_pairs
from harness.diagnosis.words import Broken, finding_line, in_parameters, on_ranks
from harness.judge.result import Diagnosis, one_cause
from harness.judge.trial import Trial

Pair = tuple[int, str]  # rank, fqn


def changed_afterwards(trial: Trial, broken: Broken) -> Diagnosis | None:
    """What the optimizer left is not what the next step began with. Gradients that are wrong before that have another cause,
    later ones follow from it."""
    changes = update.changed(trial)
    step = next(iter(changes), None)
    if "update" not in broken or step is None or any(wrong_pairs(trial, s) for s in trial.case.steps if s <= step):
        return None
    text = f"weights are changed {update.until(trial, step)}, when the optimizer is done"
    cause = f"{text}: {_as_if(trial, step, changes[step])}{_where(trial, changes[step])}"
    return one_cause(cause, (finding_line("update", broken["update"]),))


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
