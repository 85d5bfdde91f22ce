"""Tensors that change places in a reduction over replicas: a rank adds to its own what its partner has of another tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from harness.diagnosis.differences import first_wrong_step, seen_gradients, wrong_pairs
from harness.diagnosis.factors import times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import Arrays, clipping_apart
from harness.diagnosis.replicas import summed, train_apart
from harness.diagnosis.words import Pair, where_text
from harness.judge import tolerance
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.reference.distance import best_fit

Exchanged = Mapping[Pair, tuple[str, float]]
"""By rank and parameter, the one of its partner that is added to it, and how often."""


def exchanged_tensors(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Of two replicas."""
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.dims.dp_replicate == 2 else None
    ranks = {rank for rank, _ in wrong_pairs(trial, step)} if step is not None else set()
    if step is None or not ranks or len(ranks) == len(trial.ranks) or not trial.case.exact:
        return
    if found := _fitted(trial, step, _of_each_replica(trial, step)):
        (rank, fqn), (other, factor) = next(iter(found.items()))
        times = "" if factor == 1 else f" {times_text(factor)}"
        hint = f"rank {rank} adds{times} rank {_partner(trial, rank)}'s {other} to its {fqn}"
        text = f"tensors change places in the reduction over dp_replicate {where_text(trial, list(found))}"
        fitted = 1 + len({times for _, times in found.values()})
        cause = Cause("reductions exchanged", text, hint=hint)
        yield Hypothesis(cause, lambda t: clipping_apart(_assuming(t, found, since=step)), fitted)


def _partner(trial: Trial, rank: int) -> int:
    return next(other for other in trial.plan.peers(rank, "dp_replicate") if other != rank)


def _of_each_replica(trial: Trial, step: int) -> list[Arrays]:
    """What the samples of each give in this step."""
    seen: dict[int, list[Arrays]] = {}
    train_apart(trial, "dp_replicate", lambda number, gradients: summed(seen.setdefault(number, gradients)))
    return seen[step]


def _fitted(trial: Trial, step: int, own: list[Arrays]) -> dict[Pair, tuple[str, float]]:
    """own: by replica, what its samples give in this step. Empty where something wrong is no such sum."""
    found: dict[Pair, tuple[str, float]] = {}
    for rank, fqn in wrong_pairs(trial, step):
        partner = _partner(trial, rank)
        rest = seen_gradients(trial, rank, step)[fqn] - _slice(trial, rank, fqn, own)
        for other in trial.plan.slices[partner]:
            theirs = _slice(trial, partner, other, own)
            if theirs.size != rest.size or not np.any(theirs):
                continue
            factor = best_fit(rest, theirs.reshape(rest.shape))
            if tolerance.relative_difference(rest, factor * theirs.reshape(rest.shape)) < 1e-9:
                found[rank, fqn] = other, round(factor, 9)
        if (rank, fqn) not in found:
            return {}
    return found


def _slice(trial: Trial, rank: int, fqn: str, by_replica: list[Arrays]) -> np.ndarray:
    """What the rank holds of its replica's."""
    part = trial.slice_of(rank, fqn)
    assert part is not None
    return take(by_replica[coordinate(trial.case.dims, rank)["dp_replicate"]][fqn], part)


def _assuming(trial: Trial, exchanged: Exchanged, since: int) -> Trial:
    """As if tensors changed places from one step on."""

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        total = [{fqn: value.copy() for fqn, value in own.items()} for own in summed(gradients)]
        for (rank, fqn), (other, factor) in exchanged.items() if step >= since else ():
            own, theirs = _slice(trial, rank, fqn, gradients), _slice(trial, _partner(trial, rank), other, gradients)
            _slice(trial, rank, fqn, total)[...] = own + factor * theirs.reshape(own.shape)
        return total

    return train_apart(trial, "dp_replicate", reduce)
