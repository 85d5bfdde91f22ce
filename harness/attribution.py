"""How much each sample of step 1 contributed to a gradient that was observed: the weights that explain it.

A gradient is linear in the samples' own gradients, which the reference keeps at some positions of every parameter. The
weights that fit best, with 1 for the reference's own weight, say what went wrong: all equal to k is a scale, zeros are
samples that were lost, twos were counted twice, weights by rank are local averages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.checks.samples import shares_of_samples
from harness.plan import Slice
from harness.trial import Trial

EXPLAINED = 1e-6  # of the gradient's size; rounding leaves 1e-14, a gradient that is no mix of samples leaves 1e-2


@dataclass(frozen=True)
class Weights:
    """by_sample: weight by sample id, 1 where it counted as it should. residual: the share of the gradient unexplained."""

    by_sample: dict[int, float]
    residual: float

    @property
    def explained(self) -> bool:
        return self.residual < EXPLAINED

    @property
    def values(self) -> np.ndarray:
        return np.array(list(self.by_sample.values()))

    @property
    def uniform(self) -> float | None:
        """The one weight that all samples have, None if they differ."""
        middle = float(np.median(self.values))
        return middle if np.allclose(self.values, middle, rtol=1e-6, atol=1e-9) else None


def sample_weights(trial: Trial, ranks: list[int], fqns: list[str] | None = None) -> Weights | None:
    """Fitted to the step-1 gradients that `ranks` hold of `fqns` (default: all). None if they hold none."""
    rows, targets = [], []
    for rank in ranks:
        for fqn, gradient in next((s.gradients for s in trial.ranks[rank].steps if s.step == 1), {}).items():
            part = trial.slice_of(rank, fqn)
            if (fqns is None or fqn in fqns) and part is not None and fqn in trial.reference.sample_gradients:
                known = _within(trial, fqn, part, gradient)
                scale = float(np.max(np.abs(trial.reference.steps[0].gradients[fqn]), initial=0.0)) or 1.0
                rows.append(known[0].T / scale)
                targets.append(known[1] / scale)
    if not rows or sum(map(len, targets)) < len(trial.reference.samples[0]):
        return None
    matrix, target = np.concatenate(rows), np.concatenate(targets)
    fitted, *_ = np.linalg.lstsq(matrix, target, rcond=None)
    size = float(np.linalg.norm(target)) or 1.0
    residual = float(np.linalg.norm(matrix @ fitted - target)) / size
    return Weights(dict(zip(trial.reference.samples[0], map(float, fitted), strict=True)), residual)


def _within(trial: Trial, fqn: str, part: Slice, gradient: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each sample's own gradient, and the one observed, at the kept positions that lie in the slice."""
    positions = trial.reference.sample_positions[fqn]
    index = np.array(np.unravel_index(positions, trial.plan.shapes[fqn]))  # [dims, k]
    starts = np.array([start for start, _ in part])[:, None]
    stops = np.array([stop for _, stop in part])[:, None]
    inside = ((index >= starts) & (index < stops)).all(axis=0)
    observed = gradient[tuple((index - starts)[:, inside])]
    return trial.reference.sample_gradients[fqn][:, inside], observed


def expected_if_averaged_locally(trial: Trial, per_microbatch: bool) -> dict[int, float]:
    """The weights samples get when each rank (or microbatch) divides by its own number of valid tokens."""
    fed = shares_of_samples(trial, 1)
    tokens = dict(zip(trial.reference.sample_ids, (trial.reference.labels >= 0).sum(axis=1), strict=True))
    total = sum(int(tokens[i]) for i in trial.reference.samples[0])
    pieces = [
        [i for i in piece if i is not None]
        for ids in fed.values()
        for piece in (_microbatches(trial, ids) if per_microbatch else [ids])
    ]
    weights: dict[int, float] = {}
    for piece in pieces:
        own = sum(int(tokens[i]) for i in piece)
        weights |= {i: total / (len(pieces) * own) if own else 0.0 for i in piece}
    return weights


def _microbatches(trial: Trial, ids: list[int | None]) -> list[list[int | None]]:
    size = trial.case.local_batch
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def by_microbatch(trial: Trial, weights: Weights) -> list[float] | None:
    """The weight of each microbatch, if all samples of the n-th microbatches of all ranks have the same one."""
    fed = shares_of_samples(trial, 1)
    found: list[float] = []
    for index in range(trial.case.features.accumulation):
        ids = [i for share in fed.values() for i in _microbatches(trial, share)[index]]
        values = np.array([weights.by_sample.get(i, np.nan) for i in ids if i is not None])
        if not np.allclose(values, values[0], rtol=1e-6, atol=1e-9):
            return None
        found.append(float(values[0]))
    return found
