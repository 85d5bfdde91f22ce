"""Tensors that change places in a reduction over replicas: a rank adds to its own what its partner has of another tensor."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis import assume
from harness.diagnosis.differences import first_wrong_step, seen_gradients, wrong_pairs
from harness.diagnosis.factors import times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import Arrays, clipping_apart
from harness.diagnosis.replicas import share_of, summed
from harness.diagnosis.words import Pair, where_text
from harness.judge import tolerance
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.reference.distance import best_fit

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Exchanged = Mapping[Pair, tuple[str, float]]
"""By rank and parameter, the one of its partner that is added to it, and how often."""


def exchanged_tensors(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Of two replicas."""
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.dims.dp_replicate == 2 else None
    ranks = {rank for rank, _ in wrong_pairs(trial, step)} if step is not None else set()
    if step is None or not ranks or len(ranks) == len(trial.ranks) or not trial.case.exact:
        return
    seen: list[Arrays] = []
    _apart(trial, {}, until=step, seen=seen)
    found = _fitted(trial, step, seen)
    if found:
        (rank, fqn), (other, factor) = next(iter(found.items()))
        times = "" if factor == 1 else f" {times_text(factor)}"
        hint = f"rank {rank} adds{times} rank {_partner(trial, rank)}'s {other} to its {fqn}"
        text = f"tensors change places in the reduction over dp_replicate {where_text(trial, list(found))}"
        cause = Cause("reductions exchanged", text, hint=hint)
        yield Hypothesis(
            cause,
            lambda t: clipping_apart(_apart(t, found, since=step)),
            1 + len({times for _, times in found.values()}),
        )


def _partner(trial: Trial, rank: int) -> int:
    return next(other for other in trial.plan.peers(rank, "dp_replicate") if other != rank)


def _replica(trial: Trial, rank: int) -> int:
    return coordinate(trial.case.dims, rank)["dp_replicate"]


def _fitted(trial: Trial, step: int, own: list[Arrays]) -> dict[Pair, tuple[str, float]]:
    """own: by replica, what its samples give in this step. Empty where something wrong is no such sum."""
    found: dict[Pair, tuple[str, float]] = {}
    for rank, fqn in wrong_pairs(trial, step):
        part, partner = trial.slice_of(rank, fqn), _partner(trial, rank)
        if part is None:
            return {}
        rest = seen_gradients(trial, rank, step)[fqn] - take(own[_replica(trial, rank)][fqn], part)
        for other in trial.holdings[partner]:
            theirs = _slice(trial, partner, other, own[_replica(trial, partner)])
            if theirs is None or theirs.size != rest.size or not np.any(theirs):
                continue
            factor = best_fit(rest, theirs.reshape(rest.shape))
            if tolerance.relative_difference(rest, factor * theirs.reshape(rest.shape)) < 1e-9:
                found[rank, fqn] = other, round(factor, 9)
        if (rank, fqn) not in found:
            return {}
    return found


def _slice(trial: Trial, rank: int, fqn: str, whole: Arrays) -> np.ndarray | None:
    part = trial.slice_of(rank, fqn)
    return None if part is None else take(whole[fqn], part)


def _apart(
    trial: Trial, exchanged: Exchanged, *, since: int = 1, until: int | None = None, seen: list[Arrays] | None = None
) -> Trial:
    """As if tensors changed places from one step on. seen: takes what each replica's samples give in the step `until`."""
    copies = {rank: _replica(trial, rank) for rank in trial.ranks}

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        members = [[rank for rank in copies if copies[rank] == copy] for copy in (0, 1)]
        return [share_of(trial, ranks, step, batch.labels.shape) for ranks in members]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        if seen is not None and step == until:
            seen.extend(gradients)
        total = [{fqn: value.copy() for fqn, value in own.items()} for own in summed(gradients)]
        for (rank, fqn), (other, factor) in exchanged.items() if step >= since else ():
            part, partner = trial.slice_of(rank, fqn), _partner(trial, rank)
            theirs = _slice(trial, partner, other, gradients[copies[partner]])
            if part is not None and theirs is not None:
                at = tuple(slice(start, stop) for start, stop in part)
                own = gradients[copies[rank]][fqn][at]
                total[copies[rank]][fqn][at] = own + factor * theirs.reshape(own.shape)
        return total

    return assume.apart(trial, copies, [{}, {}], owners=(0, 1), shares=shares, reduce=reduce)
