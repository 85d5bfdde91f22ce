"""Norms of what ranks hold, put together as one rank sees it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np

from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate

GRADIENTS, PARAMETERS = "gradients", "parameters"
"""Fields of a step's evidence, fqn -> the rank's slice."""


def nearest(trial: Trial, rank: int) -> list[int]:
    """Return all ranks, those first whose places differ along the fewest axes: the ones that a rank adds up with. The first
    stage's copy of a tied weight counts."""
    places = {one: coordinate(trial.case.dims, one) for one in trial.ranks}
    own = coordinate(trial.case.dims, rank)
    apart = {one: sum(own[axis] != at for axis, at in place.items() if axis != "pp") for one, place in places.items()}
    return sorted(places, key=lambda one: (apart[one], places[one]["pp"], one))


def norm_of(
    trial: Trial,
    step: int,
    ranks: Iterable[int] | None = None,
    fqns: Collection[str] | None = None,
    again: str = "",
    power: float = 2,
    of: str = GRADIENTS,
) -> float:
    """Return the norm of the slices that these ranks had in a step, each counted once, as the first rank has it.

    again: once for each place along that axis. fqns: of these parameters alone. power: of the norm; the sum of powers is
    returned for any but 2, and the maximum for infinity.
    """
    found: dict[object, float] = {}
    place_in = trial.gradient_slice_of if of == GRADIENTS else trial.slice_of
    for one in sorted(trial.ranks) if ranks is None else ranks:
        place = coordinate(trial.case.dims, one).get(again)
        for record in (record for record in trial.ranks[one].steps if record.step == step):
            for fqn, tensor in getattr(record, of).items():
                key = fqn, place_in(one, fqn), place
                if key not in found and tensor.size and (fqns is None or fqn in fqns):
                    known = record.squares if (of, power) == (GRADIENTS, 2) else {}
                    found[key] = known[fqn] if known else _summed(tensor, power)
    total = max(found.values(), default=0.0) if power == math.inf else math.fsum(found.values())
    return math.sqrt(total) if power == 2 else total


def _summed(tensor: np.ndarray, power: float) -> float:
    values = tensor.ravel().astype(np.float64)
    return float(np.square(values).sum() if power == 2 else np.linalg.norm(values, power))
