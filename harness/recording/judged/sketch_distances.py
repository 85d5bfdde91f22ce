"""How far tensors of two recordings differ, and how far is no mistake.

The bound of a distance is the noise that a third recording shows, or a number documented for the dtype. The third recording is
of the first command with its weights altered by one rounding.

Muon rounds a matrix to bfloat16 before it orthogonalises it, as torch's and Keller Jordan's do. An entry that is rounded to the
other side moves the whole update by 1 or 2 percent. One repeat shows such a jump of some matrices only, so all of them have the
bound of the largest. The same holds of gradients and states in the steps that follow.
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
    """How far one tensor of the second recording is from the first one's."""

    key: Key
    """Step, kind, fqn."""
    distance: float
    """Length of the difference, relative to the first one's length."""
    fit: float
    """How often the second one is the first one, by best fit."""
    bound: float
    """The largest distance that is no mistake."""

    @property
    def is_wrong(self) -> bool:
        return not self.distance <= self.bound


class Bounds:
    """Distances that are no mistakes."""

    def __init__(self, one: Numbers, noise: Numbers | None) -> None:
        self._one, self._turned = one, orthogonalised(one)
        self._jumps = dict[tuple[bool, str], float]()
        self._noise: dict[Key, float] = {}
        self._usual: dict[tuple[int, str], float] = {}
        if noise is None:
            self.how = (
                "documented for the dtype; float8 and other casts inside of modules need the noise, recorded by --noise"
            )
            return
        for key, distance, _ in distances(one, noise):
            self._noise[key] = distance
            if (jumping := self._jumping(key)) is not None:
                self._jumps[jumping] = max(self._jumps.get(jumping, 0.0), distance)
        for step, kind in {key[:2] for key in self._noise}:
            self._usual[step, kind] = statistics.median(d for key, d in self._noise.items() if key[:2] == (step, kind))
        rounding = f"one rounding of {_dtype_text(noise)}"
        self.how = f"{TIMES:g} times the distance of a repeat whose weights were altered by {rounding}"

    def dtype(self, fqn: str) -> str:
        """Return the coarser of the dtypes that a parameter is held and computed in."""
        both = (self._one.dtypes.get(fqn, "float32"), self._one.computes_in or "float64")
        return max(both, key=lambda dtype: LEAST.get(dtype, 1e-6))

    def of(self, key: Key) -> float:
        dtype, jumping = self.dtype(key[2]), self._jumping(key)
        dtype = "bfloat16" if jumping and not self._noise else dtype
        least = LEAST.get(dtype, 1e-6) + (self._rounding(key) if key[1] == OF_UPDATES else 0.0)
        if not self._noise:
            signs = key[1] == OF_UPDATES and key[2] not in self._turned
            return max(USUAL.get(dtype, USUAL["float32"]) * (OF_SIGNS if signs else 1), least)
        own = max(self._noise.get(key, 0.0), self._usual.get(key[:2], 0.0))
        times = TIMES
        if jumping is not None and jumping in self._jumps:
            own, times = self._jumps[jumping], OF_JUMPS if jumping[0] else TIMES
        return max(times * own, least)

    def _jumping(self, key: Key) -> tuple[bool, str] | None:
        """Return as what a tensor has noise that jumps: an update of Muon's, or what follows of one; None where none does."""
        step, kind, fqn = key
        update = kind == OF_UPDATES and fqn in self._turned
        return (update, kind) if self._turned and (update or step > 1) else None

    def _rounding(self, key: Key) -> float:
        """Return what rounding of the weights alone makes of the step that is added to them, relative to that."""
        step, _, fqn = key
        weights = self._one.whole[step, WEIGHTS, fqn]
        added = float(np.linalg.norm(weights.sums - self._one.whole[step - 1, WEIGHTS, fqn].sums))
        unit = UNIT_ROUNDOFF.get(self._one.dtypes.get(fqn, "float32"), 2.0**-24)
        return ROUNDINGS * unit * weights.norm / added if added else 0.0


def _dtype_text(noise: Numbers) -> str:
    """Return what was rounded: a dtype, or that of each parameter."""
    known = sorted({*noise.dtypes.values()})
    return " and ".join(known) if noise.noise == "own" else noise.noise


def orthogonalised(one: Numbers) -> set[str]:
    """Return the parameters that Muon steps: their state is an average of gradients, and nothing else."""
    if not any(name in text.partition("(")[0] for text in one.optimizers for name in MUON):
        return set()
    kinds: dict[str, set[str]] = {}
    for _, kind, fqn in one.whole:
        kinds.setdefault(fqn, set()).add(kind)
    states = {fqn: of - {GRADIENT, WEIGHTS} for fqn, of in kinds.items()}
    return {fqn for fqn, of in states.items() if of and all("momentum" in kind for kind in of)}


def shows_no_jump(one: Numbers, noise: Numbers) -> bool:
    """Return whether Muon's roundings to bfloat16 were the same in both, which then says nothing of them."""
    turned = orthogonalised(one)
    updates = [
        distance for (_, kind, fqn), distance, _ in distances(one, noise) if kind == OF_UPDATES and fqn in turned
    ]
    return bool(turned) and max(updates, default=0.0) < JUMP


def is_too_fine(one: Numbers, noise: Numbers) -> bool:
    """Return whether weights were altered by less than the forward pass rounds them by, which then shows no noise."""
    dtypes = {*noise.dtypes.values()} if noise.noise == "own" else {noise.noise}
    altered = max((UNIT_ROUNDOFF.get(dtype, 0.0) for dtype in dtypes), default=0.0)
    return altered < UNIT_ROUNDOFF.get(one.computes_in, 0.0)


def distances(one: Numbers, other: Numbers) -> Iterator[tuple[Key, float, float]]:
    """Yield how far tensors that both have differ, and the second one's fit. What a step adds to weights is one, too."""
    for key in one.whole.keys() & other.whole.keys():
        if key[1] != WEIGHTS:
            yield (key, *apart(one.whole[key].sums, other.whole[key].sums))
    for step, kind, fqn in one.whole.keys() & other.whole.keys():
        before = _before(one, other, step, fqn)
        if kind == WEIGHTS and before is not None:
            added = [of.whole[step, kind, fqn].sums - of.whole[before, kind, fqn].sums for of in (one, other)]
            yield ((step, OF_UPDATES, fqn), *apart(*added))


def _before(one: Numbers, other: Numbers, step: int, fqn: str) -> int | None:
    """Return the step before, where both have its weights."""
    known = all((step - 1, WEIGHTS, fqn) in of.whole for of in (one, other))
    return step - 1 if known else None


def apart(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Return the length of the difference relative to the first one's, and the factor of best fit."""
    length, off = float(np.linalg.norm(one)), float(np.linalg.norm(one - other))
    if not math.isfinite(off):
        return math.inf, math.nan
    if length == 0:
        return (0.0 if off == 0 else math.inf), math.nan
    return off / length, float(one @ other) / length**2


def wrong_rows(one: Numbers, other: Numbers, wrong: TensorDistance) -> str:
    """Return in which rows a gradient is wrong; empty where blocks of rows were not recorded, or it is so in all."""
    step, kind, fqn = wrong.key
    mine, theirs = ({} if kind != GRADIENT else of.by_rows.get((step, fqn), {}) for of in (one, other))
    if not mine or mine.keys() != theirs.keys():
        return ""
    most = wrong.bound * one.whole[wrong.key].length
    found = [tuple(map(int, rows.split(":"))) for rows in mine if not np.linalg.norm(theirs[rows] - mine[rows]) <= most]
    if len(found) == len(mine):
        return ""
    joined: list[tuple[int, int]] = []
    for start, stop in sorted(found):
        begin = joined.pop()[0] if joined and joined[-1][1] == start else start
        joined.append((begin, stop))
    return f"in rows {', '.join(f'{start}:{stop}' for start, stop in joined)}" if joined else ""
