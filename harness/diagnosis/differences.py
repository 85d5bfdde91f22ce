"""Which gradients and which loss are not the reference's, and by what factor: what the rules about numbers share."""

from __future__ import annotations

import math

import numpy as np

from harness.diagnosis.words import in_parameters, on_ranks
from harness.judge import tolerance
from harness.judge.assembly import misfits
from harness.judge.contents import take
from harness.judge.losses import global_loss
from harness.judge.trial import Trial

Pair = tuple[int, str]  # rank, fqn


def seen_gradients(trial: Trial, rank: int, step: int) -> dict[str, np.ndarray]:
    return next((record.gradients for record in trial.ranks[rank].steps if record.step == step), {})


def expected_gradient(trial: Trial, rank: int, fqn: str, step: int = 1) -> np.ndarray | None:
    part = trial.slice_of(rank, fqn)
    full = trial.reference.steps[step - 1].gradients.get(fqn)
    return None if part is None or full is None else take(full, part)


def wrong_pairs(trial: Trial, step: int) -> list[Pair]:
    """(rank, fqn) whose gradient in a step is off by more than the law allows, in the model's order."""
    bound = trial.bounds.gradient[step]
    found = []
    for rank in sorted(trial.ranks):
        for fqn, seen in seen_gradients(trial, rank, step).items():
            expected = expected_gradient(trial, rank, fqn, step)
            if expected is not None:
                largest = float(np.max(np.abs(trial.reference.steps[step - 1].gradients[fqn]), initial=0.0))
                if not tolerance.relative_difference(seen, expected, largest) <= bound:
                    found.append((rank, fqn))
    return found


def fqns_of(trial: Trial, wrong: list[Pair]) -> list[str]:
    names = {fqn for _, fqn in wrong}
    return [fqn for fqn in trial.plan.shapes if fqn in names]


def where_text(trial: Trial, wrong: list[Pair]) -> str:
    return in_parameters(trial, fqns_of(trial, wrong)) + on_ranks(trial, [rank for rank, _ in wrong])


def common_factor(trial: Trial, wrong: list[Pair], step: int) -> float | None:
    factors = [factor_of(trial, rank, fqn, step) for rank, fqn in wrong]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or not np.allclose(known, known[0], rtol=1e-7, atol=1e-12):
        return None
    return float(np.median(known))


def factor_of(trial: Trial, rank: int, fqn: str, step: int) -> float | None:
    """The number that makes what is observed of what is expected; None if it is no constant."""
    seen, expected = seen_gradients(trial, rank, step)[fqn], expected_gradient(trial, rank, fqn, step)
    if expected is None or seen.shape != expected.shape or not np.any(expected):
        return None
    factor = float(np.sum(seen * expected) / np.sum(expected * expected))
    left = float(np.max(np.abs(seen - factor * expected)))
    return factor if left <= 1e-9 * max(1.0, abs(factor)) * float(np.max(np.abs(expected))) else None


def distance(trial: Trial, rank: int, fqn: str) -> float:
    expected = expected_gradient(trial, rank, fqn)
    largest = float(np.max(np.abs(trial.reference.steps[0].gradients[fqn]), initial=0.0))
    return (
        math.inf
        if expected is None
        else tolerance.relative_difference(seen_gradients(trial, rank, 1)[fqn], expected, largest)
    )


def loss_off(trial: Trial, step: int = 1) -> float | None:
    """By how much the loss of a step is off, None if it is right or was not seen."""
    seen, wanted = global_loss(trial, step), trial.reference.steps[step - 1].loss
    if seen is None:
        return None
    off = abs(seen - wanted) / abs(wanted)
    return off if not off <= trial.bounds.loss[step] else None


def first_wrong_step(trial: Trial) -> int | None:
    """The first in which a gradient is wrong, entry by entry or, in recipes with noise, as a whole."""
    for step in trial.case.steps:
        if wrong_pairs(trial, step):
            return step
        try:
            if not trial.case.exact and not all(one.within for one in misfits(trial, step)[0]):
                return step
        except tolerance.NoBound:
            return None
    return None


def holders_of(trial: Trial, fqn: str) -> list[int]:
    """The ranks that hold some of a parameter."""
    return [rank for rank, held in sorted(trial.holdings.items()) if fqn in held]
