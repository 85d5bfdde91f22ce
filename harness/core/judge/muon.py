"""Muon's updates, recomputed from the observed gradients. Muon is a function of whole matrices: slices of ranks are joined.

The arithmetic is float64 numpy, like all that the check `update` recomputes. A hypothesis may assume that each slice was
orthogonalised alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from harness.core.evidence.step import StepEvidence
from harness.core.judge import tolerance
from harness.core.judge.contents import view_of_slice
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.core.plan.slices import Slice
from harness.reference import muon
from harness.reference.config import TrainingConfig

Given = Callable[[int, StepEvidence, str], np.ndarray]
"""(rank, its record of a step, fqn) -> the gradient of its slice that the optimizer is given."""
Key = tuple[tuple[int, ...], str]
"""Ranks whose slices are put together, and the parameter's fqn."""


@dataclass(frozen=True)
class MuonUpdate:
    """The update of a matrix in one step of Muon, before learning rate and weight decay, joined from slices of ranks."""

    update: np.ndarray
    """The matrix before it is orthogonalised: the average of gradients, with nesterov mixed with the gradient. float64.

    Only a part of it, if these ranks have no more. NaN where an earlier gradient, or the average resumed from, is lacking."""
    enclosing_slice: Slice
    """Where `update` lies in the whole matrix."""
    cancelled: float
    """2-norm that `update` would have if nothing cancelled in its sums, over its 2-norm: how much relative roundings grew."""

    @functools.cached_property
    def orthogonalised(self) -> np.ndarray:
        """Return the update orthogonalised by Newton-Schulz, computed when it is first needed."""
        orthogonalised: np.ndarray = muon.newton_schulz(self.update)
        return orthogonalised

    def slice_of_update(self, part: Slice) -> np.ndarray:
        """Return a view of the orthogonalised update at a rank's slice. part: in coordinates of the whole matrix."""
        return view_of_slice(self.orthogonalised, _relative_to(part, self.enclosing_slice))


@dataclass
class MuonUpdates:
    """The updates of matrices by step, each computed once for all ranks that share it.

    recipe: (fqn, step) -> the recipe. updates_by_key: what was computed so far.
    """

    trial: Trial
    given: Given
    recipe: Callable[[str, int], TrainingConfig]
    updates_by_key: dict[Key, dict[int, MuonUpdate]] = field(default_factory=dict)

    def subtracted_and_bound(self, rank: int, step: int, fqn: str, rate: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Return (what Muon subtracts from a rank's slice in a step, without weight decay; the bound on its entries).

        Zeros if a hypothesis assumes that the update is lost. None if a slice or a gradient of the matrix was not
        observed.
        """
        trial = self.trial
        key = (self._ranks_joined(rank, fqn), fqn)
        part = trial.slice_of(rank, fqn)
        if key not in self.updates_by_key:
            self.updates_by_key[key] = dict(self._updates_by_step(*key))
        turned = self.updates_by_key[key].get(step)
        if turned is None or part is None:
            return None
        lost = trial.assumption.optimizer.lost
        if lost is not None and lost(rank, step, fqn):
            return np.zeros(view_of_slice(turned.update, _relative_to(part, turned.enclosing_slice)).shape), np.zeros(
                ()
            )
        sizes = [hi - lo for lo, hi in part] if trial.assumption.optimizer.scales_slices else trial.plan.shapes[fqn]
        scale = rate * muon.learning_rate_factor(sizes, self.recipe(fqn, step).adjust_lr)
        subtracted = scale * turned.slice_of_update(part)
        orthogonal_bound = tolerance.orthogonal_bound(trial.case, turned.update.shape, turned.cancelled)
        return subtracted, tolerance.update_bound(trial.case, np.abs(subtracted)) + scale * orthogonal_bound

    def _ranks_joined(self, rank: int, fqn: str) -> tuple[int, ...]:
        """Return the ranks whose slices Muon puts together with this rank's: its replica's that have the parameter.

        Ranks along an axis over which a hypothesis assumes that Muon gathers nothing are left out.
        """
        fixed_axes = ("dp_replicate", *self.trial.assumption.optimizer.alone)
        dims = self.trial.case.dims
        own_coordinate = coordinate_of_rank(dims, rank)
        common_axes = [
            axis for axis in own_coordinate if axis in fixed_axes or (axis == "cp" and "dp_shard" in fixed_axes)
        ]
        ranks = []
        for other in sorted(self.trial.ranks):
            if fqn in self.trial.plan.slices[other]:
                other_coordinate = coordinate_of_rank(dims, other)
                if all(other_coordinate[axis] == own_coordinate[axis] for axis in common_axes):
                    ranks.append(other)
        return tuple(ranks)

    def _updates_by_step(self, ranks: tuple[int, ...], fqn: str) -> list[tuple[int, MuonUpdate]]:
        """Return (step, update) of each step in which the gradients of all of these ranks were observed.

        Empty if a rank's slice is not known.
        """
        parts = {rank: part for rank in ranks if (part := self.trial.slice_of(rank, fqn)) is not None}
        if len(parts) < len(ranks):
            return []
        enclosing = _enclosing_slice(parts.values())
        average = _join_slices(parts, enclosing, {rank: self._initial_average(rank, fqn) for rank in parts})
        average_length = float(np.linalg.norm(average))
        updates = []
        for number in self.trial.case.steps:
            gradients = {rank: self._gradient_given(rank, number, fqn) for rank in parts}
            gradient = _join_slices(parts, enclosing, gradients)
            recipe = self.recipe(fqn, number)
            momentum = recipe.momentum
            nesterov = recipe.nesterov
            average = momentum * average + (1 - momentum) * gradient
            update = muon.matrix_to_orthogonalise(average, gradient, momentum=momentum, nesterov=nesterov)
            # The same sums over lengths instead of matrices: nothing cancels in them.
            gradient_length = float(np.linalg.norm(gradient))
            average_length = momentum * average_length + (1 - momentum) * gradient_length
            update_length = muon.matrix_to_orthogonalise(
                average_length, gradient_length, momentum=momentum, nesterov=nesterov
            )
            cancelled = update_length / max(float(np.linalg.norm(update)), muon.SMALLEST_LENGTH)
            if all(value is not None for value in gradients.values()):
                updates.append((number, MuonUpdate(update, enclosing, cancelled)))
        return updates

    def _gradient_given(self, rank: int, number: int, fqn: str) -> np.ndarray | None:
        """Return the gradient that a rank's optimizer is given in a step. None if step or gradient is not on record."""
        step = next((step for step in self.trial.ranks[rank].steps if step.step == number), None)
        return None if step is None or fqn not in step.gradients else self.given(rank, step, fqn)

    def _initial_average(self, rank: int, fqn: str) -> np.ndarray | None:
        """Return the average that training begins with: zeros, or the checkpoint's. None if the checkpoint has none."""
        resumed = self.trial.ranks[rank].resumed
        return resumed.optimizer_state.get(fqn, {}).get("momentum_buffer") if resumed else np.zeros(())


def _enclosing_slice(parts: Iterable[Slice]) -> Slice:
    """Return the smallest slice that contains all parts."""
    intervals = []
    for intervals_of_dim in zip(*parts, strict=True):
        starts, stops = zip(*intervals_of_dim, strict=True)
        intervals.append((min(starts), max(stops)))
    return tuple(intervals)


def _join_slices(parts: dict[int, Slice], enclosing: Slice, values: dict[int, np.ndarray | None]) -> np.ndarray:
    """Return an array of the enclosing slice with each rank's values at its slice.

    NaN where a value is lacking or misshapen. A value without dims fills its rank's slice.
    """
    joined = np.full(tuple(hi - lo for lo, hi in enclosing), np.nan)
    for rank, part in parts.items():
        target = view_of_slice(joined, _relative_to(part, enclosing))
        value = values[rank]
        if value is not None and value.shape in ((), target.shape):
            target[...] = value
    return joined


def _relative_to(part: Slice, enclosing: Slice) -> Slice:
    """Return the part in coordinates that begin at the start of the enclosing slice."""
    return tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(part, enclosing, strict=True))
