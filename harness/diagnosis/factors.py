"""A factor, and which number of the case it is: a degree, the accumulation, the number of valid tokens, or products."""

from __future__ import annotations

import itertools
import math

from harness.judge.trial import Trial
from harness.spec.dims import AXES

MOST_NAMES = 3


def times_text(factor: float) -> str:
    """0.25 times."""
    return f"{factor:.6g} times"


def factor_text(trial: Trial, factor: float, everywhere: bool = True) -> str:
    """All numbers of the case that the factor may be; empty if it is none. everywhere: of every parameter."""
    if math.isclose(factor, -1.0):
        return ": the sign is wrong"
    texts = []
    for value, text in ((factor, "not divided by {} ({})"), (1 / factor, "divided by {} (1/{}) once too often")):
        names = _axes(trial, value) + (_counts(trial, value) if everywhere else [])
        if names:
            texts.append(text.format(" or ".join(names[:MOST_NAMES]), round(value)))
    step = trial.reference.steps[0]
    if everywhere and factor != 1 and math.isclose(factor, step.valid_tokens / _positions(trial), rel_tol=1e-6):
        texts.append("divided by the number of all tokens, not of the valid ones")
    return f": {', or '.join(texts)}" if texts else ""


def _axes(trial: Trial, value: float) -> list[str]:
    """Degrees, or else products of as few as possible, that are `value`."""
    dims = trial.case.dims
    known = {axis: getattr(dims, axis) for axis in AXES} | {"accumulation": trial.case.features.accumulation}
    known = {name: number for name, number in known.items() if number > 1}
    for count in range(1, len(known) + 1):
        chosen = itertools.combinations(known, count)
        names = [" x ".join(some) for some in chosen if _near(value, math.prod(known[name] for name in some))]
        if names:
            return names
    return []


def _counts(trial: Trial, value: float) -> list[str]:
    training, valid = trial.case.training, trial.reference.steps[0].valid_tokens
    counts = {"valid tokens": valid, "all tokens": _positions(trial), "samples": training.global_batch}
    return [f"the number of {name}" for name, number in counts.items() if _near(value, number)]


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def _positions(trial: Trial) -> int:
    return trial.case.training.global_batch * trial.case.training.seq_len
