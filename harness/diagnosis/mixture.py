"""A gradient is a sum over what ranks received: how often each piece of it counts on each rank, fitted and assumed.

A piece is one sample on one data-parallel share, or the part of it that a cp rank receives. The gradients of pieces in the
first wrong step are those of the reference, whose parameters are still right there.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from harness.diagnosis import assume
from harness.diagnosis.differences import seen_gradients, wrong_pairs
from harness.diagnosis.words import Arrays, in_order, in_parameters
from harness.judge.assumed import AssumedOptimizer
from harness.judge.contents import take
from harness.judge.received_samples import shares_of_samples
from harness.judge.tolerance import clip_coefficient
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.plan.stages import positions

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

DATA_AXES = ("dp_shard", "dp_replicate")
Weights = Callable[[int, int], np.ndarray]
"""By step and rank, how often each piece counts. float64 [pieces]"""

EXPLAINED = 1e-6  # of a gradient's size; float64 leaves 1e-14, a gradient that is no mixture leaves 1e-2
ENTRIES = 128  # of each parameter, that weights are fitted to


@dataclass(frozen=True)
class Piece:
    """The row-th sample of the data-parallel share that `rank` stands for; of it, what the cp rank of that place receives."""

    rank: int
    row: int
    place: int


@dataclass(frozen=True)
class Mixture:
    """weights: by rank, those fitted in a step, to the parameters that are wrong in it. close: weights that are no further
    apart are the same."""

    step: int
    fqns: tuple[str, ...]
    pieces: tuple[Piece, ...]
    weights: dict[int, np.ndarray]
    close: float

    def same(self, one: np.ndarray, other: np.ndarray | float) -> bool:
        return bool(np.allclose(one, other, rtol=self.close, atol=self.close))

    def where(self, trial: Trial) -> str:
        """Nothing where it is every parameter."""
        return "" if len(self.fqns) == len(trial.plan.shapes) else " " + in_parameters(trial, self.fqns)


class Pieces:
    """The pieces of a trial, and which tokens of a step each is."""

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._masks: dict[tuple[Piece, int], np.ndarray] = {}
        cp = range(trial.case.dims.cp)
        self._shares = {step: shares_of_samples(trial, step) for step in trial.case.steps}
        shares = self._shares[trial.first_step]
        self.all = tuple(Piece(r, row, place) for r, ids in shares.items() for row in range(len(ids)) for place in cp)

    @functools.cached_property
    def known(self) -> bool:
        """Whether every rank received its samples, each one once, in every step."""
        steps = self._shares.values()
        fed = [sorted(id_ for ids in shares.values() for id_ in ids if id_ is not None) for shares in steps]
        wanted = [sorted(self.trial.reference.samples[step - 1]) for step in self.trial.case.steps]
        return fed == wanted and len({tuple(map(len, shares.values())) for shares in steps}) == 1

    def mask(self, piece: Piece, step: int) -> np.ndarray:
        """1 for each token of the piece. float64 [global_batch, seq_len of the step]"""
        if (piece, step) not in self._masks:
            self._masks[piece, step] = self._mask_of(piece, step)
        return self._masks[piece, step]

    def _mask_of(self, piece: Piece, step: int) -> np.ndarray:
        trial, length = self.trial, self.trial.case.seq_len(step)
        batch = trial.reference.samples[step - 1]
        counts = np.zeros((len(batch), length))
        if step in self._shares:
            row = batch.index(self._shares[step][piece.rank][piece.row])
        else:  # of an earlier launch, where all count alike
            row = self.all.index(piece) // trial.case.dims.cp
        counts[row, positions(trial.case, piece.place * trial.case.dims.tp, length)] = 1.0
        return counts

    def tokens(self, step: int) -> np.ndarray:
        """The valid tokens of each piece."""
        rows = [self.trial.reference.sample_ids.index(id_) for id_ in self.trial.reference.samples[step - 1]]
        valid = self.trial.reference.labels[rows, : self.trial.case.seq_len(step)] >= 0
        return np.array([float((self.mask(piece, step) * valid).sum()) for piece in self.all])


def mixture_of(trial: Trial, pieces: Pieces, step: int) -> Mixture | None:
    """None where some rank's gradient is no mixture of pieces, or too little of one is seen."""
    gradients, fqns = _of_pieces(trial, pieces, step), wrong_parameters(trial, step)
    tolerated = EXPLAINED if trial.case.exact else trial.bounds.gradient[step]
    found, worst = {}, 0.0
    for rank in sorted(trial.ranks):
        if not any(seen.size for fqn, seen in seen_gradients(trial, rank, step).items() if fqn in fqns):
            continue
        fit = _fit(trial, rank, step, fqns, gradients)
        if fit is None or not fit[1] <= tolerated:
            return None
        found[rank], worst = fit[0], max(worst, fit[1])
    return Mixture(step, fqns, pieces.all, found, max(EXPLAINED, worst)) if found else None


def _of_pieces(trial: Trial, pieces: Pieces, step: int) -> list[Arrays]:
    """Each piece's own gradient in a step."""
    seen: list[Arrays] = []

    def shares(number: int, batch: Batch) -> list[np.ndarray]:
        if number == step:
            return [pieces.mask(piece, number) for piece in pieces.all]
        return [np.ones(batch.labels.shape), *[np.zeros(batch.labels.shape)] * (len(pieces.all) - 1)]

    def reduce(number: int, gradients: list[Arrays]) -> list[Arrays]:
        if number == step:
            seen.extend(gradients)
        return [{fqn: np.asarray(sum(own[fqn] for own in gradients)) for fqn in gradients[0]}]

    owners = (0,) * len(pieces.all)
    assume.apart(trial, {}, [{}], owners=owners, shares=shares, reduce=reduce)
    return seen


def wrong_parameters(trial: Trial, step: int) -> tuple[str, ...]:
    """In recipes with noise: all, for some that are wrong stay within it."""
    wrong = (fqn for _, fqn in wrong_pairs(trial, step)) if trial.case.exact else trial.plan.shapes
    return tuple(in_order(trial, wrong))


def _fit(
    trial: Trial, rank: int, step: int, fqns: Sequence[str], gradients: list[Arrays]
) -> tuple[np.ndarray, float] | None:
    """The weights of pieces in a rank's gradient, 1 for those without a valid token, and what they leave unexplained."""
    rows, targets = [], []
    for fqn, seen in seen_gradients(trial, rank, step).items():
        part = trial.gradient_slice_of(rank, fqn) if fqn in fqns else None
        if part is None or not seen.size or seen.shape != take(gradients[0][fqn], part).shape:
            continue
        at = np.linspace(0, seen.size - 1, min(seen.size, ENTRIES)).astype(int)
        scale = float(np.max(np.abs(trial.reference_step(step).gradients[fqn]))) or 1.0
        rows.append(np.stack([take(own[fqn], part).reshape(-1)[at] for own in gradients], axis=1) / scale)
        targets.append(seen.reshape(-1)[at] / scale)
    if not rows:
        return None
    matrix, target = np.concatenate(rows).astype(np.float64), np.concatenate(targets).astype(np.float64)
    counted = np.any(matrix != 0, axis=0)
    enough = len(target) > counted.sum()  # as many numbers as unknowns are always explained
    if not enough or not np.isfinite(target).all():
        return None
    weights = np.ones(len(gradients))
    weights[counted] = np.linalg.lstsq(matrix[:, counted], target, rcond=None)[0]
    rest = float(np.linalg.norm(matrix[:, counted] @ weights[counted] - target))
    return weights, rest / (float(np.linalg.norm(target)) or 1.0)


# ---- what is assumed


def assuming(trial: Trial, pieces: Pieces, fqns: Sequence[str], weights: Weights, steps: Sequence[int]) -> Trial:
    """As if in these steps each rank's gradient of these parameters held each piece so often. Replicas that differ train
    apart, and clip by norms of their own; slices of one copy may hold other pieces."""
    ranks, once = sorted(trial.ranks), np.ones(len(pieces.all))

    def of(step: int, rank: int) -> np.ndarray:
        return weights(step, rank) if step in steps else once

    replica = {rank: coordinate(trial.case.dims, rank)["dp_replicate"] for rank in ranks}
    alike = all(np.array_equal(of(step, rank), of(step, ranks[0])) for step in steps for rank in ranks)
    copies = replica if not alike and trial.case.dims.dp_replicate > 1 else dict.fromkeys(ranks, 0)
    groups = _grouped(pieces, copies, of, steps, ranks)

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [np.asarray(sum(pieces.mask(pieces.all[i], step) for i in group)) for _, group in groups]

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        counts = {rank: of(step, rank)[[group[0] for _, group in groups]] for rank in ranks}
        of_copies = [{r: counts[r] for r in ranks if copies[r] == copy} for copy in sorted({*copies.values()})]
        return [_assembled(trial, fqns, of_copy, gradients) for of_copy in of_copies]

    count = len(set(copies.values()))
    owners = tuple(owner for owner, _ in groups)
    other = assume.apart(trial, copies, [{}] * count, owners=owners, shares=shares, reduce=reduce)
    return clipping_apart(other) if count > 1 else other


def _grouped(
    pieces: Pieces, copies: Mapping[int, int], of: Weights, steps: Sequence[int], ranks: Sequence[int]
) -> list[tuple[int, list[int]]]:
    """(copy that computes them, pieces that count alike everywhere)."""
    table = np.stack([of(step, rank) for step in steps for rank in ranks], axis=1)
    found: dict[tuple[int, bytes], list[int]] = {}
    for number, piece in enumerate(pieces.all):
        found.setdefault((copies[piece.rank], table[number].tobytes()), []).append(number)
    return [(owner, numbers) for (owner, _), numbers in found.items()]


def _assembled(trial: Trial, fqns: Sequence[str], counts: Mapping[int, np.ndarray], gradients: list[Arrays]) -> Arrays:
    """Of one copy of the model: each rank's slice of the sum that it has; of other parameters the whole sum."""
    first = next(iter(counts.values()))
    whole = {fqn: _sum(gradients, fqn, first if fqn in fqns else np.ones(len(gradients))) for fqn in gradients[0]}
    if all(np.array_equal(own, first) for own in counts.values()):
        return whole
    sums = {own.tobytes(): {fqn: _sum(gradients, fqn, own) for fqn in fqns} for own in counts.values()}
    for rank, own in counts.items():
        for fqn, part in ((fqn, trial.gradient_slice_of(rank, fqn)) for fqn in trial.holdings[rank] if fqn in fqns):
            if part is not None:
                take(whole[fqn], part)[...] = take(sums[own.tobytes()][fqn], part)
    return whole


def _sum(gradients: list[Arrays], fqn: str, weights: np.ndarray) -> np.ndarray:
    total = np.asarray(sum(w * own[fqn] for w, own in zip(weights, gradients, strict=True)))
    return total.astype(gradients[0][fqn].dtype)


def clipping_apart(trial: Trial) -> Trial:
    norms = {(r, step.step): step.grad_norm for r in trial.ranks for step in trial.reference_of(r).steps}

    def given(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        return clip_coefficient(norms[rank, step], trial.case.training.max_norm) * gradient

    return trial.assuming(AssumedOptimizer(given=given))
