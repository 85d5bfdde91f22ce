"""The records of the reference: plain values and numpy arrays, readable without torch."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import numpy as np


@dataclass(frozen=True)
class ReferenceStep:
    """One step of the reference, whole tensors by fqn. Gradients are before clipping, the rest after the step.

    grad_norm: before clipping. valid_tokens: the global number the loss is averaged over. optimizer_state: by fqn
    {"exp_avg", "exp_avg_sq"}, of Muon's {"momentum_buffer"}, empty for sgd. bfloat16 values are held as float32.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    valid_tokens: int
    gradients: dict[str, np.ndarray]
    parameters: dict[str, np.ndarray]
    optimizer_state: dict[str, dict[str, np.ndarray]]


@dataclass(frozen=True)
class Noise:
    """The distance of repeats of the reference from it, by step: the largest relative distance of any repeat.

    gradient: of the worst entry of any parameter, relative to that parameter's largest. distance, fit: of each parameter by
    fqn, the distance of its whole gradient relative to its length, and how far the best-fitting factor is from 1.
    """

    repeats: int
    loss: tuple[float, ...]
    grad_norm: tuple[float, ...]
    gradient: tuple[float, ...]
    distance: dict[str, tuple[float, ...]] = field(default_factory=dict)
    fit: dict[str, tuple[float, ...]] = field(default_factory=dict)

    @property
    def finite(self) -> bool:
        """Return whether no number is NaN or infinite."""
        spreads = (self.loss, self.grad_norm, self.gradient, *self.distance.values(), *self.fit.values())
        return all(map(math.isfinite, itertools.chain.from_iterable(spreads)))


@dataclass(frozen=True)
class ReferenceRun:
    """All that the reference computed of a recipe."""

    weights: dict[str, np.ndarray]  # before the first step, as the model holds them
    steps: tuple[ReferenceStep, ...]
    samples: tuple[tuple[int, ...], ...]  # sample ids of each step, in order, [steps][global_batch]
    sample_ids: tuple[int, ...]
    tokens: np.ndarray  # int64 [distinct samples, seq_len], in the order of sample_ids
    labels: np.ndarray  # likewise
    environment: dict[str, str] = field(default_factory=dict)
    noise: dict[str, Noise] = field(default_factory=dict)  # if measured, by the dtype in which gradients are reduced
    inputs: dict[str, float] = field(default_factory=dict)
    """Mean squares of what goes into each module in step 1, in the order of the forward pass."""
    rows: dict[str, np.ndarray] = field(default_factory=dict)
    """Fqn -> int64 [rows], the row of the model's parameter that is stored there; all others are in the model's order."""
