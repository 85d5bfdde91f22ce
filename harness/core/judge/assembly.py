"""Whole gradients put together from the slices that ranks hold, and their distances from the reference's gradients.

A bound on a whole parameter says little of a slice, because a sum over few entries varies more. So slices are put
together, as often as there are holders of each: every rank's slice is in one of these copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.core.evidence.step import StepEvidence
from harness.core.judge import tolerance
from harness.core.judge.contents import view_of_slice
from harness.core.judge.tolerance import Bounds, NoBound, ParameterBounds
from harness.core.judge.trial import Trial
from harness.core.plan.slices import Slice
from harness.reference.distance import best_fitting_factor, relative_distance
from harness.reference.record import ReferenceStep


@dataclass(frozen=True)
class Misfit:
    """The difference between one copy of a parameter's gradient and the reference's gradient, with its bounds by noise.

    ranks: those whose slices the copy is put together from. distance: relative to the reference's length. scale: the
    best-fitting factor. residual: the distance from that multiple of the reference's, relative to the longer of both.
    scale_bound: on |scale - 1|.
    """

    fqn: str
    step: int
    ranks: tuple[int, ...]
    distance: float
    scale: float
    residual: float
    distance_bound: float
    scale_bound: float

    @property
    def ratio_to_bound(self) -> float:
        """Return the larger ratio to its bound: that of distance, or that of |scale - 1|.

        NaN where the gradient has a NaN.
        """
        return float(np.max([self.distance / self.distance_bound, abs(self.scale - 1) / self.scale_bound]))

    @property
    def is_within_bound(self) -> bool:
        """Return whether distance and scale are both within their bounds. False for a NaN."""
        return self.ratio_to_bound <= 1

    @property
    def is_only_scaled(self) -> bool:
        """Return whether only the factor is wrong: the gradient divided by it is within the noise."""
        return abs(self.scale - 1) > self.scale_bound and self.residual <= self.distance_bound


def gradient_misfits(trial: Trial, number: int, bounds: Bounds | None = None) -> tuple[list[Misfit], list[str]]:
    """Return the misfit of each copy of each parameter's gradient in a step, and the fqns without a whole gradient.

    Copies within their bounds are returned, too. bounds: None for those of the trial. Raises NoBound if the noise of a
    parameter was never measured.
    """
    reference = trial.reference_step(number)
    by_parameter = (bounds or trial.bounds).by_parameter
    all_misfits: list[Misfit] = []
    lacking: list[str] = []
    for fqn, full in reference.gradients.items():
        if fqn not in by_parameter:
            accept = f"`harness golden --accept -k {trial.case.name}` measures it"
            raise NoBound(f"the noise of each parameter's gradient was never measured; {accept}")
        copies = [
            _misfit_of_copy(fqn, trial.reference_of_rank(ranks[0]).steps[number - 1], by_parameter[fqn], ranks, whole)
            for ranks, whole in _whole_copies(trial, number, fqn, full)
        ]
        all_misfits += copies
        if not copies:
            lacking.append(fqn)
    return all_misfits, lacking


def _misfit_of_copy(
    fqn: str, reference: ReferenceStep, bounds: ParameterBounds, ranks: tuple[int, ...], whole: np.ndarray
) -> Misfit:
    """Return the misfit of one whole copy of a gradient. ranks: those that hold it."""
    expected = reference.gradients[fqn]
    fit = best_fitting_factor(whole, expected)
    rest = relative_distance(whole - (fit - 1) * expected, expected) / max(1.0, abs(fit))
    return Misfit(
        fqn=fqn,
        step=reference.step,
        ranks=ranks,
        distance=relative_distance(whole, expected),
        scale=fit,
        residual=rest,
        distance_bound=bounds.distance[reference.step],
        scale_bound=bounds.fit[reference.step],
    )


def _whole_copies(
    trial: Trial, number: int, fqn: str, full: np.ndarray
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """Yield (ranks, gradient) of each whole copy made of the ranks' slices, as many as a slice has holders at most.

    Nothing is yielded if the slices do not make up the whole, each entry once.
    """
    holders_by_slice = _holders_by_slice(trial, number, fqn)
    times_covered = np.zeros(full.shape, dtype=int)
    for part in holders_by_slice:
        times_covered[tuple(slice(start, stop) for start, stop in part)] += 1
    if not holders_by_slice or not np.all(times_covered == 1):
        return
    for copy in range(max(map(len, holders_by_slice.values()))):
        gradient = np.empty(full.shape)
        ranks = []
        for part, holders in holders_by_slice.items():
            # A slice with fewer holders than another is used again, so that every holder is in some copy.
            rank, local_gradient = holders[copy % len(holders)]
            gradient[tuple(slice(start, stop) for start, stop in part)] = local_gradient
            ranks.append(rank)
        yield tuple(sorted(set(ranks))), gradient


def _holders_by_slice(trial: Trial, number: int, fqn: str) -> dict[Slice, list[tuple[int, np.ndarray]]]:
    """Return, by slice, (rank, its gradient) of each rank that holds it.

    Left out are empty slices, gradients that were not observed or have another shape, and slices that are not known.
    """
    holders_by_slice: dict[Slice, list[tuple[int, np.ndarray]]] = {}
    for rank, evidence in sorted(trial.ranks.items()):
        part = trial.gradient_slice_of(rank, fqn)
        gradient = _gradient_in_step(evidence.steps, number, fqn)
        if part is not None and gradient is not None and gradient.size and gradient.shape == _shape_of_slice(part):
            holders_by_slice.setdefault(part, []).append((rank, gradient))
    return holders_by_slice


def _gradient_in_step(steps: tuple[StepEvidence, ...], number: int, fqn: str) -> np.ndarray | None:
    """Return a rank's local gradient of a parameter in a step. None if step or gradient is not on record."""
    return next((step.gradients.get(fqn) for step in steps if step.step == number), None)


def _shape_of_slice(part: Slice) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in part)


def gradient_distance(trial: Trial, rank: int, fqn: str, gradient: np.ndarray, full: np.ndarray) -> float:
    """Return the largest absolute difference between a rank's gradient and its slice of the reference's, `full`.

    The number is relative to the largest entry of `full`. It is inf if the rank should hold nothing of the parameter.
    """
    part = trial.gradient_slice_of(rank, fqn)
    if part is None:
        return float("inf")
    return tolerance.relative_difference(gradient, view_of_slice(full, part), float(np.max(np.abs(full))))
