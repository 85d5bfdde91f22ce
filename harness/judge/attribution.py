"""How much each sample of step 1 contributed to a gradient that was observed: the weights that explain it.

A gradient is linear in the samples' own gradients, which the reference keeps at some positions of every parameter. The
weights that fit best, with 1 for the reference's own weight, say what went wrong: all equal to k is a scale, zeros are
samples that were lost, twos were counted twice, weights by rank are local averages.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from harness.judge.received_samples import shares_of_samples
from harness.judge.trial import Trial
from harness.plan.slices import Slice
from harness.plan.stages import positions

EXPLAINED = 1e-6  # of the gradient's size; float64 leaves 1e-14, a gradient that is no mix of samples leaves 1e-2


@dataclass(frozen=True)
class Weights:
    """by_sample: weight by sample id (or cp rank), 1 where it counted as it should. residual: the share of the gradient
    that is not explained. noise: what the recipe's rounding may leave of it.

    Samples that contribute nothing (no valid token) have no weight.
    """

    by_sample: dict[int, float]
    residual: float
    noise: float = EXPLAINED

    @property
    def explained(self) -> bool:
        return self.residual < self.noise

    @property
    def close(self) -> float:
        """Weights that are no further apart are the same: what is left unexplained blurs them by as much."""
        return max(EXPLAINED, self.residual)

    @property
    def values(self) -> np.ndarray:
        return np.array(list(self.by_sample.values()))

    @property
    def uniform(self) -> float | None:
        """The one weight that all samples have, None if they differ."""
        middle = float(np.median(self.values))
        return middle if np.allclose(self.values, middle, rtol=self.close, atol=self.close) else None


def sample_weights(trial: Trial, ranks: list[int]) -> Weights | None:
    """Fitted to the step-1 gradients that `ranks` hold. None if they hold too little."""
    return _fit(trial, trial.reference.sample_gradients, trial.reference.samples[0], ranks)


def part_weights(trial: Trial, ranks: list[int]) -> Weights | None:
    """The same for what each cp rank computes: weight by its place along cp. None if the reference has no such parts."""
    known = trial.reference.part_gradients
    places = [_eighths(trial, place) for place in range(trial.case.dims.cp)]
    if not known or None in places:
        return None
    summed = {f: np.stack([parts[place].sum(axis=0) for place in places]) for f, parts in known.items()}
    return _fit(trial, summed, tuple(range(trial.case.dims.cp)), ranks)


def _eighths(trial: Trial, place: int) -> list[int] | None:
    """Which eighths of the sequence the cp rank of that place receives; None if it does not receive whole ones."""
    length = trial.case.seq_len(1)
    at = positions(trial.case, place * trial.case.dims.tp, length)  # cp is next to tp
    eighths, counts = np.unique(at * 8 // length, return_counts=True)
    return eighths.tolist() if set(counts) == {length / 8} else None


def _fit(trial: Trial, parts: dict[str, np.ndarray], names: tuple[int, ...], ranks: list[int]) -> Weights | None:
    """parts: by fqn [names, k], at the positions that the reference keeps."""
    rows, targets = [], []
    for rank in ranks:
        seen = {f: g for s in trial.ranks[rank].steps if s.step == 1 for f, g in s.gradients.items()}
        for fqn, gradient in seen.items():
            part = trial.slice_of(rank, fqn)
            if part is not None and fqn in parts:
                known = _within(trial, parts[fqn], fqn, part, gradient)
                scale = float(np.max(np.abs(trial.reference.steps[0].gradients[fqn]))) or 1.0
                rows.append(known[0].T / scale)
                targets.append(known[1] / scale)
    if sum(map(len, targets)) <= len(names):  # as many numbers as unknowns are always explained
        return None
    matrix, target = np.concatenate(rows), np.concatenate(targets)
    counted = np.any(matrix != 0, axis=0)
    fitted, *_ = np.linalg.lstsq(matrix[:, counted], target, rcond=None)
    size = float(np.linalg.norm(target)) or 1.0
    residual = float(np.linalg.norm(matrix[:, counted] @ fitted - target)) / size
    ids = np.array(names)[counted].tolist()
    noise = EXPLAINED if trial.case.exact else trial.bounds.gradient[1]
    return Weights(dict(zip(ids, fitted.tolist(), strict=True)), residual, noise)


def _within(
    trial: Trial, parts: np.ndarray, fqn: str, part: Slice, gradient: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The parts' own gradients, and the one observed, at the kept positions that lie in the slice."""
    positions = trial.reference.sample_positions[fqn]
    index = np.array(np.unravel_index(positions, trial.plan.shapes[fqn]))  # [dims, k]
    starts = np.array([start for start, _ in part])[:, None]
    stops = np.array([stop for _, stop in part])[:, None]
    inside = ((index >= starts) & (index < stops)).all(axis=0)
    observed = gradient[tuple((index - starts)[:, inside])]
    return parts[:, inside], observed


def contributors(trial: Trial) -> dict[int, list[int]] | None:
    """By rank, the ranks whose samples its gradient holds. None if some rank's gradient is no mix of samples.

    Ranks at tp 0 stand for all.
    """
    received, contributing = shares_of_samples(trial, 1), {}
    for rank in received:
        weights = sample_weights(trial, [rank])
        if weights is None or not weights.explained:
            return None
        counted = {id_ for id_, weight in weights.by_sample.items() if abs(weight) > weights.close}
        contributing[rank] = [other for other, ids in received.items() if counted & set(ids)]
    return contributing


def ranks_with_labels(trial: Trial) -> list[int]:
    """The ranks that can contribute to a gradient: those that received a valid token."""
    valid = {id_ for id_, count in valid_tokens(trial).items() if count}
    return [rank for rank, ids in shares_of_samples(trial, 1).items() if valid & set(ids)]


def valid_tokens(trial: Trial) -> dict[int, int]:
    """By sample, how many of its labels count."""
    counts = (trial.reference.labels >= 0).sum(axis=1)
    return dict(zip(trial.reference.sample_ids, counts.tolist(), strict=True))


UNITS = ("rank", "microbatch of each rank", "microbatch", "sample")


def local_average(trial: Trial, weights: Weights, unit: str) -> float | None:
    """The factor k if each `unit` divided by its own number of valid tokens (and k times); None if not so."""
    expected = _weights_if_averaged(trial, _pieces(trial, unit))
    if any(not expected.get(id_) for id_ in weights.by_sample):
        return None
    ratios = np.array([weight / expected[id_] for id_, weight in weights.by_sample.items()])
    factor = float(np.median(ratios))
    return factor if np.allclose(ratios, factor, rtol=weights.close) and factor > 0 else None


def _weights_if_averaged(trial: Trial, pieces: list[list[int]]) -> dict[int, float]:
    """The weights of samples if each piece divides by its own number of valid tokens and pieces count alike."""
    tokens = valid_tokens(trial)
    total = sum(tokens[i] for i in trial.reference.samples[0])
    weights: dict[int, float] = {}
    for piece in pieces:
        own = sum(tokens[i] for i in piece)
        weights |= {i: total / (len(pieces) * own) if own else 0.0 for i in piece}
    return weights


def _pieces(trial: Trial, unit: str) -> list[list[int]]:
    """The samples of step 1, divided by who computes a loss of its own."""
    shares = [[i for i in ids if i is not None] for ids in shares_of_samples(trial, 1).values()]
    parts = [_microbatches(trial, ids) for ids in shares]
    if unit == "rank":
        return shares
    if unit == "microbatch of each rank":
        return [piece for share in parts for piece in share]
    if unit == "microbatch":
        return [[i for piece in pieces for i in piece] for pieces in zip(*parts, strict=True)]
    return [[i] for ids in shares for i in ids]


def _microbatches(trial: Trial, ids: list[int]) -> list[list[int]]:
    size = trial.case.local_batch
    return [ids[start : start + size] for start in range(0, len(ids), size)]


def by_microbatch(trial: Trial, weights: Weights) -> list[float] | None:
    """The weight of each microbatch, if all samples of the n-th microbatches of all ranks have the same one."""
    found: list[float] = []
    for ids in _pieces(trial, "microbatch"):
        values = np.array([weights.by_sample[i] for i in ids if i in weights.by_sample])
        if not values.size or not np.allclose(values, np.mean(values), rtol=weights.close, atol=weights.close):
            return None
        found.append(float(np.mean(values)))
    return found
