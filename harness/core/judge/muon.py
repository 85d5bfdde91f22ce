"""What Muon makes of the gradients seen. It is a function of whole matrices, so slices of all ranks are put together.

In float64 and in numpy, as all that `update` recomputes. A hypothesis may say that each slice was orthogonalised alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from harness.core.evidence.step import StepEvidence
from harness.core.judge import tolerance
from harness.core.judge.contents import take
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.core.plan.slices import Slice
from harness.reference import muon
from harness.reference.config import TrainingConfig

Given = Callable[[int, StepEvidence, str], np.ndarray]
"""(rank, step, fqn) -> the gradient of its slice that the optimizer is given."""
Key = tuple[tuple[int, ...], str]
"""Ranks whose slices are put together, and the parameter."""


@dataclass(frozen=True)
class Turned:
    """What a step of Muon adds to a matrix, but for the rate."""

    update: np.ndarray
    """What is orthogonalised: the matrix, or the part of it that these ranks have."""
    place: Slice
    """Where that part lies in the matrix."""
    cancelled: float
    """Length of all that was averaged, over that of the average: how much its roundings grew, as it cancelled."""

    @functools.cached_property
    def whole(self) -> np.ndarray:
        """Return it orthogonalised, computed when it is first needed."""
        turned: np.ndarray = muon.newton_schulz(self.update)
        return turned

    def of(self, part: Slice) -> np.ndarray:
        """Return what lies in a rank's slice of the matrix."""
        return take(self.whole, _within(part, self.place))


@dataclass
class Matrices:
    """Each matrix by step, kept for the ranks that share it. recipe: by parameter and step."""

    trial: Trial
    given: Given
    recipe: Callable[[str, int], TrainingConfig]
    known: dict[Key, dict[int, Turned]] = field(default_factory=dict)

    def added(self, rank: int, step: int, fqn: str, rate: float) -> tuple[np.ndarray, np.ndarray] | None:
        """Return what Muon subtracts from the rank's slice, decay left out, and the bound on that.

        None: a slice or a gradient of the matrix was not seen."""
        key, part, trial = (self._together(rank, fqn), fqn), self.trial.slice_of(rank, fqn), self.trial
        if key not in self.known:
            self.known[key] = dict(self._steps(*key))
        turned = self.known[key].get(step)
        if turned is None or part is None:
            return None
        lost = trial.assumption.optimizer.lost
        if lost is not None and lost(rank, step, fqn):
            return np.zeros(take(turned.update, _within(part, turned.place)).shape), np.zeros(())
        sizes = [hi - lo for lo, hi in part] if trial.assumption.optimizer.scales_slices else trial.plan.shapes[fqn]
        scale = rate * muon.scale(sizes, self.recipe(fqn, step).adjust_lr)
        own, off = (
            scale * turned.of(part),
            tolerance.orthogonal_bound(trial.case, turned.update.shape, turned.cancelled),
        )
        return own, tolerance.update_bound(trial.case, np.abs(own)) + scale * off

    def _together(self, rank: int, fqn: str) -> tuple[int, ...]:
        """The rank's replica, without those from which a hypothesis says that Muon gathers nothing."""
        fixed = ("dp_replicate", *self.trial.assumption.optimizer.alone)
        dims, mine = self.trial.case.dims, coordinate(self.trial.case.dims, rank)
        axes = [axis for axis in mine if axis in fixed or (axis == "cp" and "dp_shard" in fixed)]
        others = (r for r in sorted(self.trial.ranks) if fqn in self.trial.plan.slices[r])
        return tuple(r for r in others if all(coordinate(dims, r)[axis] == mine[axis] for axis in axes))

    def _steps(self, ranks: tuple[int, ...], fqn: str) -> list[tuple[int, Turned]]:
        parts = {rank: part for rank in ranks if (part := self.trial.slice_of(rank, fqn)) is not None}
        if len(parts) < len(ranks):
            return []
        place = tuple(
            (min(lo), max(hi)) for lo, hi in (zip(*dim, strict=True) for dim in zip(*parts.values(), strict=True))
        )
        average = _laid(parts, place, {rank: self._begun(rank, fqn) for rank in parts})
        length, found = float(np.linalg.norm(average)), []
        for number in self.trial.case.steps:
            given = {rank: self._given(rank, number, fqn) for rank in parts}
            gradient, recipe = _laid(parts, place, given), self.recipe(fqn, number)
            by, nesterov = recipe.momentum, recipe.nesterov
            average = by * average + (1 - by) * gradient
            update = muon.given(average, gradient, momentum=by, nesterov=nesterov)
            own = float(np.linalg.norm(gradient))
            length = by * length + (1 - by) * own
            averaged = muon.given(length, own, momentum=by, nesterov=nesterov)
            cancelled = averaged / max(float(np.linalg.norm(update)), muon.SMALLEST)
            if all(value is not None for value in given.values()):
                found.append((number, Turned(update, place, cancelled)))
        return found

    def _given(self, rank: int, number: int, fqn: str) -> np.ndarray | None:
        step = next((one for one in self.trial.ranks[rank].steps if one.step == number), None)
        return None if step is None or fqn not in step.gradients else self.given(rank, step, fqn)

    def _begun(self, rank: int, fqn: str) -> np.ndarray | None:
        """Return the average that training begins with: zeros, or the checkpoint's."""
        resumed = self.trial.ranks[rank].resumed
        return resumed.optimizer_state.get(fqn, {}).get("momentum_buffer") if resumed else np.zeros(())


def _laid(parts: dict[int, Slice], place: Slice, values: dict[int, np.ndarray | None]) -> np.ndarray:
    """Put slices together; NaN where one is lacking."""
    whole = np.full(tuple(hi - lo for lo, hi in place), np.nan)
    for rank, part in parts.items():
        target, value = take(whole, _within(part, place)), values[rank]
        if value is not None and value.shape in ((), target.shape):
            target[...] = value
    return whole


def _within(part: Slice, place: Slice) -> Slice:
    return tuple((lo - start, hi - start) for (lo, hi), (start, _) in zip(part, place, strict=True))
