"""A gradient is a sum over what ranks received: how often each piece of it counts on each rank, fitted and assumed.

A piece is one sample on one data-parallel share, or the part of it that a cp rank receives. Where the loss is computed in
chunks of positions, each chunk is one. The gradients of pieces in the first wrong step are those of the reference, whose
parameters are still right there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.core.causes import assume
from harness.core.causes.assume import clipping_apart
from harness.core.causes.differences import seen_gradients, wrong_pairs
from harness.core.causes.words import Arrays, in_order
from harness.core.checks.samples import parts_of
from harness.core.judge.contents import take
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.received_samples import shares_of_samples
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.stages import positions

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

Weights = Callable[[int, int], np.ndarray]
"""(step, rank) -> how often each piece counts. float64 [pieces], or [2, pieces]: of this step, and of the step before."""

EXPLAINED = 1e-6  # of a gradient's size; float64 leaves 1e-14, a gradient that is no sum of pieces leaves 1e-2
ENTRIES = 128  # of each parameter, that weights are fitted to


class Pieces:
    """The pieces of a trial, which tokens of a step each is, and its gradient."""

    def __init__(self, trial: Trial, chunks: int = 1) -> None:
        self.trial, self.chunks, self._masks = trial, chunks, dict[tuple[int, int], np.ndarray]()
        self._shares = {step: shares_of_samples(trial, step) for step in trial.case.steps}
        shares, parts = self._shares[trial.first_step], [*np.ndindex(trial.case.dims.cp, chunks)]
        rows = [(rank, row) for rank, ids in shares.items() for row in range(len(ids))]
        self.all = tuple((*row, *part) for row in rows for part in parts)
        """(the rank that stands for the share, the sample's number in it, the cp rank that receives it, the chunk)"""
        self.row = np.array([row for _, row, _, _ in self.all])
        self.chunk = np.array([chunk for _, _, _, chunk in self.all])
        self.microbatch = self.row // trial.case.local_batch

    @functools.cached_property
    def known(self) -> bool:
        """Whether every rank received its samples, each one once, in every step."""
        steps = self._shares.values()
        received = [sorted(id_ for ids in shares.values() for id_ in ids if id_ is not None) for shares in steps]
        wanted = [sorted(self.trial.reference.samples[step - 1]) for step in self.trial.case.steps]
        return received == wanted and len({tuple(map(len, shares.values())) for shares in steps}) == 1

    def places(self, axes: Sequence[str]) -> np.ndarray:
        """Return where each piece is received, along these axes. int [pieces, axes]"""
        at = [{**coordinate(self.trial.case.dims, rank), "cp": place} for rank, _, place, _ in self.all]
        return np.array([[place[axis] for axis in axes] for place in at], dtype=int).reshape(len(at), len(axes))

    def mask(self, number: int, step: int) -> np.ndarray:
        """Return 1 for each token of a piece. float64 [global_batch, seq_len of the step]"""
        if (number, step) not in self._masks:
            trial, length, (rank, row, place, chunk) = self.trial, self.trial.case.seq_len(step), self.all[number]
            batch = trial.reference.samples[step - 1]
            of_step = self._shares.get(step)  # nothing of an earlier launch, where all count alike
            at = batch.index(of_step[rank][row]) if of_step else number // (trial.case.dims.cp * self.chunks)
            counts = self._masks[number, step] = np.zeros((len(batch), length))
            of_rank = positions(trial.case, place * trial.case.dims.tp, length)
            width = -(-len(of_rank) // self.chunks)
            counts[at, of_rank[chunk * width : (chunk + 1) * width]] = 1.0
        return self._masks[number, step]

    def tokens(self, step: int) -> np.ndarray:
        """Return the number of valid tokens of each piece."""
        rows = [self.trial.reference.sample_ids.index(id_) for id_ in self.trial.reference.samples[step - 1]]
        valid = self.trial.reference.labels[rows, : self.trial.case.seq_len(step)] >= 0
        return np.array([float((self.mask(number, step) * valid).sum()) for number in range(len(self.all))])

    def gradients(self, step: int) -> list[Arrays]:
        """Compute each piece's own gradient in a step."""
        seen: list[Arrays] = []

        def shares(number: int, batch: Batch) -> list[np.ndarray]:
            if number == step:
                return [self.mask(piece, number) for piece in range(len(self.all))]
            return [np.ones(batch.labels.shape), *[np.zeros(batch.labels.shape)] * (len(self.all) - 1)]

        def reduce(number: int, gradients: list[Arrays]) -> list[Arrays]:
            if number == step:
                seen.extend(gradients)
            return [{fqn: np.asarray(sum(own[fqn] for own in gradients)) for fqn in gradients[0]}]

        until = replace(self.trial.reference, samples=self.trial.reference.samples[:step])
        until = replace(until, steps=until.steps[:step])
        first, owners = replace(self.trial, reference=until), (0,) * len(self.all)
        assume.apart(first, {}, [{}], owners=owners, shares=shares, reduce=reduce)
        return seen


def chunks_of_the_loss(trial: Trial, step: int) -> int:
    """Return into how many chunks of positions the losses of a step were cut, 1 where they were not or others than positions.
    Chunks in which no label counts may have been left out."""
    seen = [part for rank in last_stage_ranks(trial) for part in parts_of(trial, rank, step) if part.chunks]
    widths = {-(-size // trial.case.local_batch) for part in seen for size in part.chunks}
    length = len(positions(trial.case, 0, trial.case.seq_len(step)))
    even = all(size % trial.case.local_batch == 0 for part in seen for size in part.chunks)
    return -(-length // max(widths)) if widths and even else 1


# ---- what is fitted


@dataclass(frozen=True)
class Fit:
    """How often pieces count in the gradients of the first wrong step."""

    trial: Trial
    pieces: Pieces
    step: int
    fqns: tuple[str, ...]
    """The parameters whose gradients are wrong in it."""
    weights: dict[int, np.ndarray]
    """Rank -> weights, float64 [pieces]."""
    close: float
    """Weights that differ by no more are the same."""

    def same(self, one: np.ndarray | float, other: np.ndarray | float) -> bool:
        return bool(np.allclose(one, other, rtol=self.close, atol=self.close))

    @functools.cached_property
    def counted(self) -> np.ndarray:
        """Return which pieces have a valid token."""
        return self.pieces.tokens(self.step) > 0

    @functools.cached_property
    def alike(self) -> np.ndarray | None:
        """The weights on all ranks; None where ranks have others."""
        first, *others = self.weights.values()
        return np.asarray(np.mean([first, *others], axis=0)) if all(self.same(own, first) for own in others) else None

    def factor(self, fixed: Weights, free: Weights, known: Sequence[float]) -> float | None:
        """Return how often `free` counts beside `fixed`; None if weights are not so. known: numbers that it may be."""
        at = self.counted
        pairs = [(w[at], fixed(self.step, rank)[at], free(self.step, rank)[at]) for rank, w in self.weights.items()]
        ratios = np.concatenate([(w - own)[times != 0] / times[times != 0] for w, own, times in pairs])
        if not ratios.size:
            return None
        factor = float(np.median(ratios))
        factor = float(next((one for one in (*known, round(factor)) if self.same(factor, one)), factor))
        return factor if factor and all(self.same(w, own + factor * times) for w, own, times in pairs) else None


def fit_of(trial: Trial, pieces: Pieces, gradients: list[Arrays], step: int) -> Fit | None:
    """Fit the weights of pieces with these gradients; None where some rank's is no sum of them, or too little of one is seen.

    In recipes with noise all parameters are fitted, for some that are wrong stay within it.
    """
    wrong = (fqn for _, fqn in wrong_pairs(trial, step)) if trial.case.exact else trial.plan.shapes
    fqns, tolerated = tuple(in_order(trial, wrong)), EXPLAINED if trial.case.exact else trial.bounds.gradient[step]
    fits = [(rank, _fitted(trial, rank, step, fqns, gradients)) for rank in sorted(trial.ranks)]
    found = {rank: fit for rank, fit in fits if fit is not None}
    worst = max((rest for _, rest in found.values()), default=np.inf)
    if not worst <= tolerated:
        return None
    return Fit(trial, pieces, step, fqns, {rank: own for rank, (own, _) in found.items()}, max(EXPLAINED, worst))


def _fitted(
    trial: Trial, rank: int, step: int, fqns: Sequence[str], gradients: list[Arrays]
) -> tuple[np.ndarray, float] | None:
    """Return the weights of pieces in a rank's gradient, and what they leave unexplained. A piece without a valid token has
    weight 1. None if the rank has nothing of it."""
    rows, targets = [], []
    for fqn, seen in seen_gradients(trial, rank, step).items():
        part = trial.gradient_slice_of(rank, fqn) if fqn in fqns else None
        if part is not None and seen.size and seen.shape == take(gradients[0][fqn], part).shape:
            at = np.linspace(0, seen.size - 1, min(seen.size, ENTRIES)).astype(int)
            scale = float(np.max(np.abs(trial.reference_step(step).gradients[fqn]))) or 1.0
            rows.append(np.stack([take(own[fqn], part).reshape(-1)[at] for own in gradients], axis=1) / scale)
            targets.append(seen.reshape(-1)[at] / scale)
    if not rows:
        return None
    matrix, target = np.concatenate(rows).astype(np.float64), np.concatenate(targets).astype(np.float64)
    weights, counted = np.ones(len(gradients)), np.any(matrix != 0, axis=0)
    if len(target) <= counted.sum() or not np.isfinite(target).all():  # as many numbers as unknowns always fit
        return weights, np.inf
    weights[counted] = np.linalg.lstsq(matrix[:, counted], target, rcond=None)[0]
    rest = float(np.linalg.norm(matrix @ weights - target))
    return weights, rest / (float(np.linalg.norm(target)) or 1.0)


# ---- what is assumed


def assuming(trial: Trial, pieces: Pieces, fqns: Sequence[str], weights: Weights, steps: Sequence[int]) -> Trial:
    """Assume that in these steps each rank's gradient of these parameters holds each piece so often. Replicas that differ train
    separately, and clip by norms of their own; slices of one copy may hold other pieces."""
    ranks, once = sorted(trial.ranks), np.stack([np.ones(len(pieces.all)), np.zeros(len(pieces.all))])
    table = {(step, rank): once.copy() for step in trial.case.steps for rank in ranks}
    for (step, rank), counts in table.items():
        own = np.atleast_2d(weights(step, rank)) if step in steps else once
        counts[: len(own)] = own
    alike = all(np.array_equal(own, table[step, ranks[0]]) for (step, _), own in table.items())
    replica = {rank: coordinate(trial.case.dims, rank)["dp_replicate"] for rank in ranks}
    copies = dict.fromkeys(ranks, 0) if alike else replica
    columns, found = np.concatenate([*table.values()]), dict[tuple[int, bytes], list[int]]()
    for number, (rank, *_) in enumerate(pieces.all):  # pieces that count alike everywhere are computed together
        found.setdefault((copies[rank], columns[:, number].tobytes()), []).append(number)
    firsts, before = [numbers[0] for numbers in found.values()], dict[int, list[Arrays]]()

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [np.asarray(sum(pieces.mask(number, step) for number in numbers)) for numbers in found.values()]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        before[step] = gradients
        both = gradients + before.get(step - 1, [])
        counts = {rank: table.get((step, rank), once)[:, firsts].ravel()[: len(both)] for rank in ranks}
        of_copies = [{r: counts[r] for r in ranks if copies[r] == copy} for copy in sorted({*copies.values()})]
        return [_of_copy(trial, fqns, of_copy, both, len(gradients)) for of_copy in of_copies]

    owners, count = tuple(owner for owner, _ in found), len({*copies.values()})
    other = assume.apart(trial, copies, [{}] * count, owners=owners, shares=shares, reduce=reduce)
    return clipping_apart(other) if count > 1 else other


def _of_copy(
    trial: Trial, fqns: Sequence[str], counts: Mapping[int, np.ndarray], gradients: list[Arrays], once: int
) -> Arrays:
    """Return each rank's slice of the sum that it has; of other parameters the sum of the first `once`."""
    sums = {own.tobytes(): {fqn: _sum(gradients, fqn, own) for fqn in fqns} for own in counts.values()}
    others = {fqn: _sum(gradients, fqn, np.arange(len(gradients)) < once) for fqn in gradients[0] if fqn not in fqns}
    whole = {**others, **next(iter(sums.values()))}

    def own(rank: int, fqn: str) -> np.ndarray:
        part = trial.gradient_slice_of(rank, fqn)
        assert part is not None
        return take(sums[counts[rank].tobytes()][fqn], part)

    return with_slices(trial, whole, fqns, counts, own) if len(sums) > 1 else whole


def _sum(gradients: list[Arrays], fqn: str, weights: np.ndarray) -> np.ndarray:
    total = sum(weight * own[fqn] for weight, own in zip(weights, gradients, strict=True))
    return np.asarray(total).astype(gradients[0][fqn].dtype)


def with_slices(
    trial: Trial,
    gradients: Arrays,
    fqns: Sequence[str],
    ranks: Sequence[int] | Mapping[int, object],
    of: Callable[[int, str], np.ndarray],
) -> Arrays:
    """Return the gradients, with each of these ranks' slices of these parameters replaced."""
    whole = {**gradients, **{fqn: gradients[fqn].copy() for fqn in fqns}}
    for rank, fqn in itertools.product(ranks, fqns):
        if fqn in trial.holdings[rank] and (part := trial.gradient_slice_of(rank, fqn)) is not None:
            take(whole[fqn], part)[...] = of(rank, fqn)
    return whole
