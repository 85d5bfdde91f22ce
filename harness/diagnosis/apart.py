"""Replicas that train separately: copies of the model, each with what its ranks received, their gradients reduced or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.diagnosis import assume
from harness.diagnosis.words import Arrays
from harness.judge.assumed import AssumedOptimizer
from harness.judge.received_samples import received_samples
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.grid import coordinate

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Reduce = Callable[[int, list[Arrays]], list[Arrays]]


def train_apart(
    trial: Trial, axis: str, reduce: Reduce | None = None, otherwise: Sequence[dict[str, Any]] | None = None
) -> Trial:
    """Assume that the replicas along an axis (dp_replicate) are separate copies.

    reduce(step, gradients by replica) -> those that each has then; None: their sum. The last argument is, by replica, what
    reference.counterfactual changes.
    """
    copies = {rank: coordinate(trial.case.dims, rank)[axis] for rank in trial.ranks}
    members = [[rank for rank in copies if copies[rank] == copy] for copy in range(max(copies.values()) + 1)]

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [share_of(trial, ranks, step, batch.labels.shape) for ranks in members]

    owners, together = tuple(range(len(members))), reduce or (lambda step, gradients: summed(gradients))
    return assume.apart(trial, copies, otherwise or [{}] * len(members), owners=owners, shares=shares, reduce=together)


def share_of(trial: Trial, ranks: Sequence[int], step: int, shape: tuple[int, ...]) -> np.ndarray:
    """Return how often each token of a step counts if only these ranks' samples do. float64 [global_batch, seq_len]"""
    received = received_samples(trial, step)
    ids = {id_ for rank in trial.one_rank_per_share() if rank in ranks for id_ in received.get(rank, [])}
    counts = np.zeros(shape)
    counts[[place for place, id_ in enumerate(trial.reference.samples[step - 1]) if id_ in ids]] = 1.0
    return counts


def summed(gradients: list[Arrays]) -> list[Arrays]:
    """Return the sum of all, for every replica."""
    first, *others = gradients
    total = {fqn: sum((own[fqn] for own in others), start=value) for fqn, value in first.items()}
    return [total for _ in gradients]


def replicas_differ(trial: Trial, of: Callable[[int, str], object]) -> bool:
    """Say whether two replicas along dp_replicate have something else of one and the same slice."""
    seen: dict[object, tuple[int, object]] = {}
    for rank, held in trial.holdings.items():
        for fqn in held:
            replica, key = coordinate(trial.case.dims, rank)["dp_replicate"], (fqn, trial.slice_of(rank, fqn))
            other, value = seen.setdefault(key, (replica, of(rank, fqn)))
            if other != replica and value != of(rank, fqn):
                return True
    return False


def clipping_apart(trial: Trial) -> Trial:
    """Assume that each rank clips by the norm of the gradients of its copy."""
    norms = {(r, step.step): step.grad_norm for r in trial.ranks for step in trial.reference_of(r).steps}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[rank, step], trial.case.training.max_norm) * gradient

    return trial.assuming(AssumedOptimizer(given=given))
