"""Literal weights: how often each piece of what ranks received counts in their gradients, as it is fitted and as it follows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from literal import ADAMW, tiny_case, trial_of

from harness.diagnosis.contributions import Fit, _fit_of
from harness.diagnosis.mixture import Mixture, Piece, Pieces
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

SIXTEEN = replace(ADAMW, global_batch=16, seq_len=8)
EVERY_AXIS = ParallelDims(dp_replicate=2, dp_shard=2, cp=2)


def every_axis(**features: object) -> Trial:
    """Ranks 0, 2, 4 and 6 stand for the shares, of two microbatches of two samples."""
    return trial_of(tiny_case(EVERY_AXIS, SIXTEEN, accumulation=2, **features))


def fit_of(trial: Trial, weights: np.ndarray, step: int = 1, close: float = 1e-6) -> Fit:
    """As if each rank's gradient held the pieces so often."""
    pieces = Pieces(trial)
    seen = dict.fromkeys(trial.ranks, np.asarray(weights, float))
    return _fit_of(trial, pieces, Mixture(step, tuple(trial.plan.shapes), pieces.all, seen, close))


def weights_of(trial: Trial, unit: Callable[[Piece], object], step: int = 1) -> np.ndarray:
    """Each unit divides by its own number of valid tokens, and the units' means are averaged."""
    pieces = Pieces(trial)
    own: dict[object, float] = {}
    for piece, tokens in zip(pieces.all, pieces.tokens(step), strict=True):
        own[unit(piece)] = own.get(unit(piece), 0.0) + tokens
    return np.array([sum(own.values()) / (len(own) * (own[unit(piece)] or 1)) for piece in pieces.all])


def with_labels(trial: Trial, labels: np.ndarray) -> Trial:
    return replace(trial, reference=replace(trial.reference, labels=labels))
