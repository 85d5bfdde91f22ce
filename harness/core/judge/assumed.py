"""Assumptions that a hypothesis makes and that neither a case nor a plan can express: the input of judging again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from harness.reference.config import TrainingConfig
from harness.reference.record import ReferenceRun


@dataclass(frozen=True)
class AssumedOptimizer:
    """An assumption about the optimizer on some ranks or parameters. A field with its default: as requested."""

    given: Callable[[int, int, str, np.ndarray], np.ndarray | None] | None = None
    """(rank, step, fqn, gradient) -> what it is given in place of the clipped gradient; None: it leaves the parameter alone."""
    rate: Callable[[int, int, str], float] | None = None
    """(rank, step, fqn) -> the learning rate."""
    recipe: Callable[[int, str], TrainingConfig] | None = None
    """(step, fqn) -> the recipe."""
    counter: Callable[[int, str], int] | None = None
    """(step, fqn) -> the steps taken, for its bias correction."""
    begun: Callable[[int, str], np.ndarray] | None = None
    """(rank, fqn) -> the value that its first step is made from, of the rank's slice."""
    amsgrad: bool = False
    """Whether it divides by the largest second moment so far, and keeps that."""
    lost: Callable[[int, int, str], bool] | None = None
    """(rank, step, fqn) -> whether Muon's update does not reach the parameter, which only decays."""
    alone: tuple[str, ...] = ()
    """Axes over whose ranks Muon puts no matrix together: each orthogonalises what it has of it."""
    scales_slices: bool = False
    """Whether Muon's rate is scaled by the shape of a rank's slice."""
    decays_frozen: bool = False
    """Whether frozen parameters shrink by the weight decay."""
    copies: int = 0
    """How many more numbers it keeps of each parameter than requested."""

    def combined_with(self, other: AssumedOptimizer) -> AssumedOptimizer:
        """Return both assumptions together. Where both set a field, the other's is taken.

        A parameter that either of them leaves alone (`given` returns None) is left alone.
        """
        overrides = {key: value for key, value in vars(other).items() if value}
        first = self.given
        second = other.given
        if first and second:
            overrides["given"] = lambda *key: None if first(*key) is None else second(*key)
        return replace(self, **overrides)


@dataclass(frozen=True)
class Assumption:
    """All assumptions about one trial. Fields with their defaults assume nothing."""

    optimizer: AssumedOptimizer = AssumedOptimizer()
    """What the optimizer does."""
    reference: Mapping[str, Any] = field(default_factory=dict)
    """With what the reference was trained again, in the words of reference.counterfactual."""
    reports: Mapping[str, Callable[[int, int], float]] = field(default_factory=dict)
    """Check -> (rank, step) -> what each rank reports of a step."""
    references: Mapping[int, ReferenceRun] = field(default_factory=dict)
    """Rank -> its own reference, where ranks train separate copies."""
    exported: Mapping[str, np.ndarray] = field(default_factory=dict)
    """Name of an exported tensor -> what it holds."""
    apart: bool = False
    """Whether ranks train separate copies, be it with one copy of the model."""
    undrawn: frozenset[int] = frozenset()
    """Steps in which forward passes draw no random numbers."""

    def extended_with(
        self,
        optimizer: AssumedOptimizer = AssumedOptimizer(),
        reports: Mapping[str, Callable[[int, int], float]] | None = None,
        **instead: Any,
    ) -> Assumption:
        """Return this assumption with the optimizer's and the reports added. instead: other fields, replaced."""
        merged_reports = {**self.reports, **(reports or {})}
        return replace(self, optimizer=self.optimizer.combined_with(optimizer), reports=merged_reports, **instead)


AS_REQUESTED = Assumption()
