"""Distances between tensors of two recordings, and the largest ones that are no mistake.

The bound of a distance is the noise that a third recording shows, or a number documented for the dtype. The third
recording is of the first command with its weights altered by one rounding.

Muon rounds a matrix to bfloat16 before it orthogonalises it, as torch's and Keller Jordan's do. An entry that is
rounded to the other side moves the whole update by 1 or 2 percent. One repeat shows such a jump of some matrices only,
so all of them have the bound of the largest. The same holds of gradients and states in the steps that follow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from harness.recording.judged.judge_sketched import Key, Numbers
from harness.recording.sketches import GRADIENT, WEIGHTS

TIMES = 8.0
"""Times the noise that a distance may be. Sketches estimate it within a quarter; right layouts were seen within 2."""
LEAST = {"float64": 1e-13, "float32": 1e-6, "bfloat16": 1e-3, "float16": 2e-4}
"""Dtype -> a distance that is no mistake, whatever the noise: sums are added in another order."""
USUAL = {"float64": 1e-9, "float32": 2e-3, "bfloat16": 0.15, "float16": 0.05}
"""Dtype -> the bound of a distance where no noise was recorded."""
OF_SIGNS = 4.0
"""Times that bound of what a step adds: AdamW divides small gradients, whose signs rounding may turn, by their size."""
EQUAL = 1e-6
"""The bound of weights that should be the same numbers, relative to their norm."""
ROUNDINGS = 4.0
"""Roundings of weights by which two updates may differ."""
UNIT_ROUNDOFF = {"float64": 2.0**-53, "float32": 2.0**-24, "bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Dtype -> half the distance of 1 from the next larger number; of bfloat16 all of it, for many of its optimizers truncate."""
OF_UPDATES = "update"
MUON = ("Muon", "Dion")
"""What names of classes of optimizers contain that orthogonalise matrices, rounded to bfloat16."""
OF_JUMPS = 3.0
"""Times the largest jump of Muon's updates: it is one of many, and right layouts were seen within 1.4 of it."""
JUMP = UNIT_ROUNDOFF["bfloat16"]
"""The least by which an entry that bfloat16 rounds to the other side moves an update. Seen: 1.4e-2 to 1.9e-2."""


@dataclass(frozen=True)
class TensorDistance:
    """Distance of one tensor of the second recording from the first one's, with the bound that it is judged by."""

    key: Key
    """Step, kind, fqn."""
    distance: float
    """Length of the difference, relative to the first one's length; 0 is equal."""
    fit: float
    """Factor of best fit: the first one's tensor times it is nearest to the second one's.

    NaN if the first one is zero.
    """
    bound: float
    """The largest distance that is no mistake."""

    @property
    def is_wrong(self) -> bool:
        return not self.distance <= self.bound


class Bounds:
    """Bounds of distances, for each tensor: from a recording of noise where there is one, else from its dtype.

    `how` says which.
    """

    def __init__(self, baseline: Numbers, noise: Numbers | None) -> None:
        self._baseline = baseline
        self._muon_fqns = muon_parameters(baseline)
        self._jumps = dict[tuple[bool, str], float]()
        self._noise: dict[Key, float] = {}
        self._usual: dict[tuple[int, str], float] = {}
        if noise is None:
            self.how = (
                "documented for the dtype; float8 and other casts inside of modules need the noise, recorded by --noise"
            )
            return
        for key, distance, _ in distances(baseline, noise):
            self._noise[key] = distance
            if (jump_kind := self._jump_kind(key)) is not None:
                self._jumps[jump_kind] = max(self._jumps.get(jump_kind, 0.0), distance)
        for step, kind in {key[:2] for key in self._noise}:
            self._usual[step, kind] = statistics.median(d for key, d in self._noise.items() if key[:2] == (step, kind))
        rounding = f"one rounding of {_dtype_text(noise)}"
        self.how = f"{TIMES:g} times the distance of a repeat whose weights were altered by {rounding}"

    def dtype(self, fqn: str) -> str:
        """Return the coarser of the dtypes that a parameter is stored and computed in, such as "bfloat16".

        A dtype that is not known counts as float32 for storage, and as float64 for the forward pass.
        """
        both = (self._baseline.dtypes.get(fqn, "float32"), self._baseline.computes_in or "float64")
        return max(both, key=lambda dtype: LEAST.get(dtype, 1e-6))

    def bound(self, key: Key) -> float:
        """Return the largest distance of a tensor that is no mistake, relative to its length.

        With noise it is a multiple of the tensor's own noise or of the median of its step and kind, whichever is
        larger. Where Muon's roundings jump it is a multiple of the largest jump. It is never below LEAST for the dtype.
        """
        dtype = self.dtype(key[2])
        jump_kind = self._jump_kind(key)
        if jump_kind and not self._noise:
            dtype = "bfloat16"
        least = LEAST.get(dtype, 1e-6) + (self._rounding(key) if key[1] == OF_UPDATES else 0.0)
        if not self._noise:
            signs = key[1] == OF_UPDATES and key[2] not in self._muon_fqns
            return max(USUAL.get(dtype, USUAL["float32"]) * (OF_SIGNS if signs else 1), least)
        noise = max(self._noise.get(key, 0.0), self._usual.get(key[:2], 0.0))
        times = TIMES
        if jump_kind is not None and jump_kind in self._jumps:
            noise = self._jumps[jump_kind]
            times = OF_JUMPS if jump_kind[0] else TIMES
        return max(times * noise, least)

    def _jump_kind(self, key: Key) -> tuple[bool, str] | None:
        """Return (whether it is Muon's update, kind) of a tensor whose noise jumps; None if its noise does not.

        Besides Muon's updates that is everything after step 1 of a job with Muon.
        """
        step, kind, fqn = key
        update = kind == OF_UPDATES and fqn in self._muon_fqns
        return (update, kind) if self._muon_fqns and (update or step > 1) else None

    def _rounding(self, key: Key) -> float:
        """Return how much rounding of the weights alone changes the update that they show, relative to the update; 0
        for no update."""
        step, _, fqn = key
        weights = self._baseline.whole[step, WEIGHTS, fqn]
        added = float(np.linalg.norm(weights.sums - self._baseline.whole[step - 1, WEIGHTS, fqn].sums))
        unit = UNIT_ROUNDOFF.get(self._baseline.dtypes.get(fqn, "float32"), 2.0**-24)
        return ROUNDINGS * unit * weights.norm / added if added else 0.0


def _dtype_text(noise: Numbers) -> str:
    """Return the dtype by one rounding of which weights were altered, or those of all parameters if it was each one's own."""
    known = sorted({*noise.dtypes.values()})
    return " and ".join(known) if noise.noise == "own" else noise.noise


def muon_parameters(numbers: Numbers) -> set[str]:
    """Return the fqns that Muon steps: all of their optimizer state is momentum. Empty if no optimizer is Muon."""
    if not any(_is_muon(optimizer) for optimizer in numbers.optimizers):
        return set()
    kinds_of_parameters: dict[str, set[str]] = {}
    for _, kind, fqn in numbers.whole:
        kinds_of_parameters.setdefault(fqn, set()).add(kind)
    fqns = set()
    for fqn, kinds in kinds_of_parameters.items():
        state_kinds = kinds - {GRADIENT, WEIGHTS}
        if state_kinds and all("momentum" in kind for kind in state_kinds):
            fqns.add(fqn)
    return fqns


def _is_muon(optimizer: str) -> bool:
    """Return whether the class of an optimizer, as the recorder writes it, orthogonalises matrices."""
    return any(name in optimizer.partition("(")[0] for name in MUON)


def shows_no_jump(baseline: Numbers, noise: Numbers) -> bool:
    """Return whether Muon's roundings to bfloat16 were the same in both: the noise then says nothing of them.

    False without Muon.
    """
    muon_fqns = muon_parameters(baseline)
    updates = [
        distance
        for (_, kind, fqn), distance, _ in distances(baseline, noise)
        if kind == OF_UPDATES and fqn in muon_fqns
    ]
    return bool(muon_fqns) and max(updates, default=0.0) < JUMP


def is_too_fine(baseline: Numbers, noise: Numbers) -> bool:
    """Return whether weights were altered by less than the forward pass rounds them by: such a recording shows no noise."""
    dtypes = {*noise.dtypes.values()} if noise.noise == "own" else {noise.noise}
    altered = max((UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return altered < UNIT_ROUNDOFF.get(baseline.computes_in, 0.0)


def distances(baseline: Numbers, candidate: Numbers) -> Iterator[tuple[Key, float, float]]:
    """Yield (key, distance, factor of best fit) of each tensor that both have, and of what each step adds to weights
    (OF_UPDATES).

    Weights themselves are left out. What a step adds is left out if one of both lacks the weights of the step before.
    """
    for key in baseline.whole.keys() & candidate.whole.keys():
        if key[1] != WEIGHTS:
            yield (key, *distance_and_fit(baseline.whole[key].sums, candidate.whole[key].sums))
    for step, kind, fqn in baseline.whole.keys() & candidate.whole.keys():
        before = _step_before(baseline, candidate, step, fqn)
        if kind == WEIGHTS and before is not None:
            added = [
                numbers.whole[step, kind, fqn].sums - numbers.whole[before, kind, fqn].sums
                for numbers in (baseline, candidate)
            ]
            yield ((step, OF_UPDATES, fqn), *distance_and_fit(*added))


def _step_before(baseline: Numbers, candidate: Numbers, step: int, fqn: str) -> int | None:
    """Return the step before, None where one of both lacks its weights of this parameter."""
    known = all((step - 1, WEIGHTS, fqn) in numbers.whole for numbers in (baseline, candidate))
    return step - 1 if known else None


def distance_and_fit(expected: np.ndarray, observed: np.ndarray) -> tuple[float, float]:
    """Return the length of the difference relative to the first one's, and the factor of best fit.

    The factor times `expected` fits `observed`. They are inf and NaN if the difference is not finite. If `expected` is
    zero, the factor is NaN, and the distance 0 if both are equal, else inf.
    """
    length = float(np.linalg.norm(expected))
    off = float(np.linalg.norm(expected - observed))
    if not math.isfinite(off):
        return math.inf, math.nan
    if length == 0:
        return (0.0 if off == 0 else math.inf), math.nan
    return off / length, float(expected @ observed) / length**2


def wrong_rows_text(baseline: Numbers, candidate: Numbers, wrong: TensorDistance) -> str:
    """Return in which rows a gradient is wrong, as "in rows 0:16, 32:48".

    Empty for other kinds, where blocks of rows were not recorded in both, or if all or no blocks are wrong.
    """
    step, kind, fqn = wrong.key
    if kind != GRADIENT:
        return ""
    expected = baseline.by_rows.get((step, fqn), {})
    observed = candidate.by_rows.get((step, fqn), {})
    if not expected or expected.keys() != observed.keys():
        return ""
    largest = wrong.bound * baseline.whole[wrong.key].length
    wrong_blocks: list[tuple[int, ...]] = []
    for rows in expected:
        if not np.linalg.norm(observed[rows] - expected[rows]) <= largest:
            wrong_blocks.append(tuple(map(int, rows.split(":"))))
    if len(wrong_blocks) == len(expected):
        return ""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(wrong_blocks):
        begin = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((begin, stop))
    return f"in rows {', '.join(f'{start}:{stop}' for start, stop in joined)}" if joined else ""
