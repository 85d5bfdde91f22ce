"""Replicas that train apart: copies of the model, fed what their ranks received, their gradients reduced or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.diagnosis import assume
from harness.diagnosis.differences import first_wrong_step, seen_gradients, wrong_pairs
from harness.diagnosis.factors import times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.mixture import clipping_apart
from harness.diagnosis.words import Arrays, Pair, where_text
from harness.judge import tolerance
from harness.judge.assumed import AssumedOptimizer
from harness.judge.contents import take
from harness.judge.received_samples import received_samples
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.reference.distance import best_fit

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Reduce = Callable[[int, list[Arrays]], list[Arrays]]


def train_apart(
    trial: Trial, axis: str, reduce: Reduce | None = None, otherwise: Sequence[dict[str, Any]] | None = None
) -> Trial:
    """As if the replicas along an axis (dp_replicate) were copies of their own.

    reduce(step, gradients by replica) -> those that each has then; None: their sum. otherwise: by replica, in the words of
    reference.counterfactual.Otherwise.
    """
    copies = {rank: coordinate(trial.case.dims, rank)[axis] for rank in trial.ranks}
    members = [[rank for rank in copies if copies[rank] == copy] for copy in range(max(copies.values()) + 1)]

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [share_of(trial, ranks, step, batch.labels.shape) for ranks in members]

    owners, together = tuple(range(len(members))), reduce or (lambda step, gradients: summed(gradients))
    return assume.apart(trial, copies, otherwise or [{}] * len(members), owners=owners, shares=shares, reduce=together)


def optimizer_of_ranks(
    trial: Trial, assumed: AssumedOptimizer, of_ranks: Callable[[Sequence[int]], dict[str, Any]], *, differ: bool
) -> Trial:
    """As if ranks' optimizers had done something else. of_ranks: how a copy of the model that these hold is trained then, in
    the words of Otherwise. differ: replicas along dp_replicate train apart."""
    if not differ:
        return assume.another_optimizer(trial, assumed, **of_ranks(sorted(trial.ranks)))
    places = {rank: coordinate(trial.case.dims, rank)["dp_replicate"] for rank in trial.ranks}
    replicas = [[rank for rank in places if places[rank] == number] for number in range(trial.case.dims.dp_replicate)]
    return train_apart(trial, "dp_replicate", otherwise=[of_ranks(ranks) for ranks in replicas]).assuming(assumed)


def replicas_differ(trial: Trial, of: Callable[[int, str], object]) -> bool:
    """Whether two replicas along dp_replicate have something else of one and the same slice."""
    seen: dict[object, tuple[int, object]] = {}
    for rank, held in trial.holdings.items():
        for fqn in held:
            replica, key = coordinate(trial.case.dims, rank)["dp_replicate"], (fqn, trial.slice_of(rank, fqn))
            other, value = seen.setdefault(key, (replica, of(rank, fqn)))
            if other != replica and value != of(rank, fqn):
                return True
    return False


def share_of(trial: Trial, ranks: Sequence[int], step: int, shape: tuple[int, ...]) -> np.ndarray:
    """How often the tokens of a step count if only these ranks' samples do. float64 [global_batch, seq_len]"""
    received = received_samples(trial, step)
    fed = [rank for rank in trial.one_rank_per_share() if rank in ranks]
    ids = {id_ for rank in fed for id_ in received.get(rank, [])}
    counts = np.zeros(shape)
    counts[[place for place, id_ in enumerate(trial.reference.samples[step - 1]) if id_ in ids]] = 1.0
    return counts


def summed(gradients: list[Arrays]) -> list[Arrays]:
    """Every replica has the sum of all."""
    first, *others = gradients
    total = {fqn: sum((own[fqn] for own in others), start=value) for fqn, value in first.items()}
    return [total for _ in gradients]


# ---- tensors that change places in a reduction over replicas


Exchanged = Mapping[Pair, tuple[str, float]]
"""By rank and parameter, the one of its partner that is added to it, and how often."""


def exchanged_tensors(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Of two replicas."""
    if "gradients" not in broken or trial.case.dims.dp_replicate != 2 or not trial.case.exact:
        return
    step = first_wrong_step(trial)
    if step is None or len({rank for rank, _ in wrong_pairs(trial, step)}) == len(trial.ranks):
        return
    if found := _fitted(trial, step, _of_each_replica(trial, step)):
        (rank, fqn), (other, factor) = next(iter(found.items()))
        times = "" if factor == 1 else f" {times_text(factor)}"
        hint = f"rank {rank} adds{times} rank {_partner(trial, rank)}'s {other} to its {fqn}"
        text = f"tensors are swapped in the reduction over dp_replicate {where_text(trial, list(found))}"
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
        partner, seen, mine = (
            _partner(trial, rank),
            seen_gradients(trial, rank, step)[fqn],
            _slice(trial, rank, fqn, own),
        )
        if seen.shape != mine.shape:
            return {}
        rest = seen - mine
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
