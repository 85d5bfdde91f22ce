"""Gradients as sums of pieces of what ranks received: how often each piece counts on each rank, fitted and assumed.

A piece is one sample on one data-parallel share, or the part of it that a cp rank receives. Where the loss is computed
in chunks of positions, each chunk is one. The gradients of pieces in the first wrong step are those of the reference,
whose parameters are still right there.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from harness.core.causes import assume
from harness.core.causes.assume import assume_separate_clipping
from harness.core.causes.differences import observed_gradients, pairs_with_wrong_gradient
from harness.core.causes.words import Arrays, sort_fqns
from harness.core.judge.contents import view_of_slice
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.received_samples import microbatches_of, requested_rows, samples_of_shares
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.stages import token_positions_of_rank

if TYPE_CHECKING:
    from harness.reference.counterfactual import Batch

WeightsOfPieces = Callable[[int, int], np.ndarray]
"""(step, rank) -> how often each piece counts. float64 [pieces], or [2, pieces]: of this step, and of the step before."""

TOLERATED_RESIDUAL = 1e-6  # of a gradient's size; float64 leaves 1e-14, a gradient that is no sum of pieces leaves 1e-2
FITTED_ENTRIES = 128  # of each parameter, that weights are fitted to


class Pieces:
    """The pieces of a trial: where each was received, its tokens in a step, and its gradient.

    all: the pieces. row, chunk, microbatch: int [pieces], the sample's number on its share, the chunk, and the
    microbatch from 0.
    """

    def __init__(self, trial: Trial, chunks: int = 1) -> None:
        self.trial = trial
        self.chunks = chunks
        self._masks = dict[tuple[int, int], np.ndarray]()
        self._shares = {step: samples_of_shares(trial, step) for step in trial.case.steps}
        pieces: list[tuple[int, int, int, int]] = []
        for rank, sample_ids in self._shares[trial.first_step].by_rank.items():
            for row in range(len(sample_ids)):
                pieces += [(rank, row, cp_rank, chunk) for cp_rank, chunk in np.ndindex(trial.case.dims.cp, chunks)]
        self.all = tuple(pieces)
        """(the rank that stands for the share, the sample's number in it, the cp rank that receives it, the chunk)"""
        self.row = np.array([row for _, row, _, _ in self.all])
        self.chunk = np.array([chunk for _, _, _, chunk in self.all])
        self.microbatch = self.row // trial.case.local_batch

    @functools.cached_property
    def all_received_once(self) -> bool:
        """Return whether the ranks together received each sample of every step once, in shares of constant sizes."""
        steps = self._shares.values()
        sizes_of_shares = {tuple(map(len, samples.by_rank.values())) for samples in steps}
        return all(samples.counts == samples.requested for samples in steps) and len(sizes_of_shares) == 1

    def mesh_coordinates(self, axes: Sequence[str]) -> np.ndarray:
        """Return the mesh coordinate at which each piece is received, along these axes, int [pieces, axes]."""
        coordinates = []
        for rank, _, cp_rank, _ in self.all:
            mesh_coordinate = {**coordinate_of_rank(self.trial.case.dims, rank), "cp": cp_rank}
            coordinates.append([mesh_coordinate[axis] for axis in axes])
        return np.array(coordinates, dtype=int).reshape(len(coordinates), len(axes))

    def token_mask(self, number: int, step: int) -> np.ndarray:
        """Return an array with 1 for each token of a piece in a step, else 0. float64 [global_batch, seq_len]

        number: the piece's index in `all`. seq_len is the step's.
        """
        if (number, step) not in self._masks:
            trial = self.trial
            length = self.trial.case.seq_len(step)
            rank, row, cp_rank, chunk = self.all[number]
            batch = trial.reference.samples[step - 1]
            batch_row = number // (trial.case.dims.cp * self.chunks)  # of an earlier launch, where all count alike
            if step in self._shares and self._shares[step].by_rank:
                batch_row = batch.index(self._shares[step].by_rank[rank][row])
            counts = np.zeros((len(batch), length))
            self._masks[number, step] = counts
            positions_of_rank = token_positions_of_rank(trial.case, cp_rank * trial.case.dims.tp, length)
            width = -(-len(positions_of_rank) // self.chunks)
            counts[batch_row, positions_of_rank[chunk * width : (chunk + 1) * width]] = 1.0
        return self._masks[number, step]

    def valid_tokens(self, step: int) -> np.ndarray:
        """Return the number of valid tokens of each piece in a step, float64 [pieces]."""
        valid = self.trial.reference.labels[requested_rows(self.trial, step), : self.trial.case.seq_len(step)] >= 0
        return np.array([float((self.token_mask(number, step) * valid).sum()) for number in range(len(self.all))])

    def gradients(self, step: int) -> list[Arrays]:
        """Return each piece's own gradient in a step, by fqn, in the order of `all`.

        Trains the reference again up to it; imports torch.
        """
        gradients_of_pieces: list[Arrays] = []

        def shares(number: int, batch: Batch) -> list[np.ndarray]:
            """Return the tokens of each copy: its piece in `step`, in earlier steps all tokens for the first copy."""
            if number == step:
                return [self.token_mask(piece, number) for piece in range(len(self.all))]
            zeros = [np.zeros(batch.labels.shape)] * (len(self.all) - 1)
            return [np.ones(batch.labels.shape), *zeros]

        def reduce(number: int, gradients: list[Arrays]) -> list[Arrays]:
            """Return the sum of all copies' gradients, and keep each of them in `step`."""
            if number == step:
                gradients_of_pieces.extend(gradients)
            total = {}
            for fqn in gradients[0]:
                total[fqn] = np.asarray(sum(of_piece[fqn] for of_piece in gradients))
            return [total]

        until = replace(self.trial.reference, samples=self.trial.reference.samples[:step])
        until = replace(until, steps=until.steps[:step])
        trial_until = replace(self.trial, reference=until)
        owners = (0,) * len(self.all)
        assume.assume_separate_copies(trial_until, {}, [{}], owners=owners, shares=shares, reduce=reduce)
        return gradients_of_pieces


def count_loss_chunks(trial: Trial, step: int) -> int:
    """Return into how many chunks of positions the losses of a step were cut. 1 if they were not, or otherwise.

    Chunks in which no label counts may have been left out.
    """
    sizes: list[int] = []
    for rank in last_stage_ranks(trial):
        for part in microbatches_of(trial, rank, step):
            if part.chunks:
                sizes += part.chunks
    widths = {-(-size // trial.case.local_batch) for size in sizes}
    length = len(token_positions_of_rank(trial.case, 0, trial.case.seq_len(step)))
    even = all(size % trial.case.local_batch == 0 for size in sizes)
    return -(-length // max(widths)) if widths and even else 1


# ---- what is fitted


@dataclass(frozen=True)
class FittedWeights:
    """Fitted numbers of how often each piece counts in each rank's gradients of the first wrong step."""

    trial: Trial
    pieces: Pieces
    step: int
    fqns: tuple[str, ...]
    """The parameters whose gradients were fitted."""
    weights: dict[int, np.ndarray]
    """Rank -> weights, float64 [pieces]."""
    tolerance: float
    """Weights that differ by no more are the same."""

    def is_same_weight(self, first: np.ndarray | float, second: np.ndarray | float) -> bool:
        """Return whether two weights are equal within what the fit leaves."""
        return bool(np.allclose(first, second, rtol=self.tolerance, atol=self.tolerance))

    @functools.cached_property
    def has_tokens(self) -> np.ndarray:
        """Return, for each piece, whether it has a valid token in the step, bool [pieces].

        Without one its weight is not known.
        """
        return self.pieces.valid_tokens(self.step) > 0

    @functools.cached_property
    def common_weights(self) -> np.ndarray | None:
        """Return the mean weights of all ranks, float64 [pieces]. None if ranks have different ones."""
        first, *others = self.weights.values()
        if not all(self.is_same_weight(weights, first) for weights in others):
            return None
        return np.asarray(np.mean([first, *others], axis=0))

    def fit_factor(self, fixed: WeightsOfPieces, free: WeightsOfPieces, known: Sequence[float]) -> float | None:
        """Return the one number x for which all weights are fixed + x * free, on all ranks.

        None if there is none, or it is 0. A number of `known`, or an integer, is taken if x is equal to it within the
        fit.
        """
        counted = self.has_tokens
        triples = []
        for rank, weights in self.weights.items():
            triples.append((weights[counted], fixed(self.step, rank)[counted], free(self.step, rank)[counted]))
        ratios_of_ranks = []
        for weights, base, times in triples:
            ratios_of_ranks.append((weights - base)[times != 0] / times[times != 0])
        ratios = np.concatenate(ratios_of_ranks)
        if not ratios.size:
            return None
        factor = float(np.median(ratios))
        factor = float(
            next((number for number in (*known, round(factor)) if self.is_same_weight(factor, number)), factor)
        )
        explains_all = all(self.is_same_weight(weights, base + factor * times) for weights, base, times in triples)
        return factor if factor and explains_all else None


def fit_weights(trial: Trial, pieces: Pieces, gradients: list[Arrays], step: int) -> FittedWeights | None:
    """Return the weights of pieces in each rank's wrong gradients of a step.

    None if a rank's gradient is no sum of pieces. None as well if too few entries are on record. In recipes with noise
    all parameters are fitted, because some that are wrong stay within it. gradients: those of the pieces.
    """
    wrong = (
        (fqn for _, fqn in pairs_with_wrong_gradient(trial, step))
        if trial.case.has_derived_bounds
        else trial.plan.shapes
    )
    fqns = tuple(sort_fqns(trial, wrong))
    tolerated = TOLERATED_RESIDUAL if trial.case.has_derived_bounds else trial.bounds.gradient[step]
    weights_of_ranks = {}
    residuals = []
    for rank in sorted(trial.ranks):
        fit = _fit_rank(trial, rank, step, fqns, gradients)
        if fit is not None:
            weights, residual = fit
            weights_of_ranks[rank] = weights
            residuals.append(residual)
    worst = max(residuals, default=np.inf)
    if not worst <= tolerated:
        return None
    return FittedWeights(trial, pieces, step, fqns, weights_of_ranks, max(TOLERATED_RESIDUAL, worst))


def _fit_rank(
    trial: Trial, rank: int, step: int, fqns: Sequence[str], gradients: list[Arrays]
) -> tuple[np.ndarray, float] | None:
    """Return (weights of pieces in a rank's gradients, what they leave unexplained relative to its norm).

    A piece without a valid token has weight 1. None if the rank has no entry of these parameters. The rest is inf if
    there are too few entries, or some that are not finite.
    """
    rows = []
    targets = []
    for fqn, observed in observed_gradients(trial, rank, step).items():
        part = trial.gradient_slice_of(rank, fqn) if fqn in fqns else None
        if part is not None and observed.size and observed.shape == view_of_slice(gradients[0][fqn], part).shape:
            entries = np.linspace(0, observed.size - 1, min(observed.size, FITTED_ENTRIES)).astype(int)
            scale = float(np.max(np.abs(trial.reference_step(step).gradients[fqn]))) or 1.0
            columns = [view_of_slice(of_piece[fqn], part).reshape(-1)[entries] for of_piece in gradients]
            rows.append(np.stack(columns, axis=1) / scale)
            targets.append(observed.reshape(-1)[entries] / scale)
    if not rows:
        return None
    matrix = np.concatenate(rows).astype(np.float64)  # [entries, pieces]
    target = np.concatenate(targets).astype(np.float64)  # [entries]
    weights = np.ones(len(gradients))
    counted = np.any(matrix != 0, axis=0)
    if len(target) <= counted.sum() or not np.isfinite(target).all():  # as many numbers as unknowns always fit
        return weights, np.inf
    weights[counted] = np.linalg.lstsq(matrix[:, counted], target, rcond=None)[0]
    residual = float(np.linalg.norm(matrix @ weights - target))
    return weights, residual / (float(np.linalg.norm(target)) or 1.0)


# ---- what is assumed


def assume_piece_weights(
    trial: Trial, pieces: Pieces, fqns: Sequence[str], weights: WeightsOfPieces, steps: Sequence[int]
) -> Trial:
    """Return the trial as if each rank's gradient of these parameters counted each piece so often in these steps.

    Imports torch. If ranks differ, the replicas along dp_replicate train separately, and clip by norms of their own.
    Slices of one copy may still count other pieces.
    """
    ranks = sorted(trial.ranks)
    once = np.stack([np.ones(len(pieces.all)), np.zeros(len(pieces.all))])
    table = {}
    for step in trial.case.steps:
        for rank in ranks:
            table[step, rank] = once.copy()
    for (step, rank), counts in table.items():
        of_rank = np.atleast_2d(weights(step, rank)) if step in steps else once
        counts[: len(of_rank)] = of_rank
    ranks_agree = all(np.array_equal(counts, table[step, ranks[0]]) for (step, _), counts in table.items())
    replica = {rank: coordinate_of_rank(trial.case.dims, rank)["dp_replicate"] for rank in ranks}
    copies = dict.fromkeys(ranks, 0) if ranks_agree else replica
    columns = np.concatenate([*table.values()])
    numbers_by_column = dict[tuple[int, bytes], list[int]]()
    for number, (rank, *_) in enumerate(pieces.all):  # pieces that count alike everywhere are computed together
        numbers_by_column.setdefault((copies[rank], columns[:, number].tobytes()), []).append(number)
    firsts = [numbers[0] for numbers in numbers_by_column.values()]
    gradients_by_step = dict[int, list[Arrays]]()

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        """Return the tokens of each set of pieces that count alike."""
        masks = []
        for numbers in numbers_by_column.values():
            masks.append(np.asarray(sum(pieces.token_mask(number, step) for number in numbers)))
        return masks

    def reduce(step: int, gradients: list[Arrays]) -> list[Arrays]:
        """Return the gradients of each copy: its ranks' weighted sums of this step's and the last step's."""
        gradients_by_step[step] = gradients
        of_both_steps = gradients + gradients_by_step.get(step - 1, [])
        counts = {}
        for rank in ranks:
            counts[rank] = table.get((step, rank), once)[:, firsts].ravel()[: len(of_both_steps)]
        of_copies = []
        for copy in sorted({*copies.values()}):
            counts_of_copy = {rank: counts[rank] for rank in ranks if copies[rank] == copy}
            of_copies.append(_gradients_of_copy(trial, fqns, counts_of_copy, of_both_steps, len(gradients)))
        return of_copies

    owners = tuple(owner for owner, _ in numbers_by_column)
    count = len({*copies.values()})
    assumed = assume.assume_separate_copies(trial, copies, [{}] * count, owners=owners, shares=shares, reduce=reduce)
    return assume_separate_clipping(assumed) if count > 1 else assumed


def _gradients_of_copy(
    trial: Trial, fqns: Sequence[str], counts: Mapping[int, np.ndarray], gradients: list[Arrays], once: int
) -> Arrays:
    """Return a copy's gradients by fqn: of `fqns` each rank's slice of its own weighted sum of `gradients`.

    Of all other parameters the sum of the first `once` gradients. counts: by rank of the copy, the weight of each
    gradient.
    """
    sums = {}
    for weights in counts.values():
        sums[weights.tobytes()] = {fqn: _weighted_sum(gradients, fqn, weights) for fqn in fqns}
    whole = {}
    for fqn in gradients[0]:
        if fqn not in fqns:
            whole[fqn] = _weighted_sum(gradients, fqn, np.arange(len(gradients)) < once)
    whole |= next(iter(sums.values()))

    def summed_slice(rank: int, fqn: str) -> np.ndarray:
        """Return a rank's slice of its own weighted sum of a parameter's gradients."""
        part = trial.gradient_slice_of(rank, fqn)
        assert part is not None
        return view_of_slice(sums[counts[rank].tobytes()][fqn], part)

    return replace_slices(trial, whole, fqns, counts, summed_slice) if len(sums) > 1 else whole


def _weighted_sum(gradients: list[Arrays], fqn: str, weights: np.ndarray) -> np.ndarray:
    """Return the sum of a parameter's gradients, each times its weight, in the dtype of the first."""
    total = sum(weight * summand[fqn] for weight, summand in zip(weights, gradients, strict=True))
    return np.asarray(total).astype(gradients[0][fqn].dtype)


def replace_slices(
    trial: Trial,
    gradients: Arrays,
    fqns: Sequence[str],
    ranks: Sequence[int] | Mapping[int, object],
    slice_of: Callable[[int, str], np.ndarray],
) -> Arrays:
    """Return the whole gradients by fqn, with each of these ranks' slices of `fqns` replaced.

    The given arrays stay as they are. slice_of: (rank, fqn) -> the new slice.
    """
    whole = {**gradients, **{fqn: gradients[fqn].copy() for fqn in fqns}}
    for rank, fqn in itertools.product(ranks, fqns):
        if fqn in trial.local_slices[rank] and (part := trial.gradient_slice_of(rank, fqn)) is not None:
            view_of_slice(whole[fqn], part)[...] = slice_of(rank, fqn)
    return whole
