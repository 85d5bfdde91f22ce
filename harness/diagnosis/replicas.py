"""Replicas that train apart: copies of the model, fed what their ranks received, their gradients reduced or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.diagnosis import assume
from harness.judge.assumed import AssumedOptimizer
from harness.judge.received_samples import received_samples
from harness.judge.trial import Trial
from harness.plan.grid import coordinate

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Arrays = dict[str, np.ndarray]
Reduce = Callable[[int, list[Arrays]], list[Arrays]]


def train_apart(
    trial: Trial, axis: str, reduce: Reduce | None = None, otherwise: Sequence[dict[str, Any]] | None = None
) -> Trial:
    """As if the replicas along an axis (dp_replicate) were copies of their own.

    reduce(step, gradients by replica) -> those that each has then; None: their sum. otherwise: by replica, in the words of
    reference.counterfactual.Otherwise.
    """
    copies = {rank: coordinate(trial.case.dims, rank)[axis] for rank in trial.ranks}
    count = max(copies.values()) + 1

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [
            share_of(trial, [r for r in copies if copies[r] == copy], step, batch.labels.shape) for copy in range(count)
        ]

    return assume.apart(
        trial,
        copies,
        owners=tuple(range(count)),
        shares=shares,
        reduce=reduce or (lambda step, gradients: summed(gradients)),
        otherwise=otherwise or [{}] * count,
    )


def optimizer_of_ranks(
    trial: Trial, assumed: AssumedOptimizer, of_ranks: Callable[[Sequence[int]], dict[str, Any]], *, differ: bool
) -> Trial:
    """As if ranks' optimizers had done something else. of_ranks: how a copy of the model that these hold is trained then, in
    the words of Otherwise. differ: replicas along dp_replicate train apart."""
    if not differ:
        return assume.another_optimizer(trial, assumed, **of_ranks(sorted(trial.ranks)))
    replicas = [_ranks_of_replica(trial, number) for number in range(trial.case.dims.dp_replicate)]
    other = train_apart(trial, "dp_replicate", otherwise=[of_ranks(ranks) for ranks in replicas])
    return replace(other, assumed=trial.assumed.and_besides(assumed))


def _ranks_of_replica(trial: Trial, number: int) -> list[int]:
    return [rank for rank in trial.ranks if coordinate(trial.case.dims, rank)["dp_replicate"] == number]


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
    total = {fqn: np.asarray(sum(own[fqn] for own in gradients)) for fqn in gradients[0]}
    return [total for _ in gradients]
