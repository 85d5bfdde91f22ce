"""Norms of gradients or parameters, summed over the slices of ranks."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

import numpy as np

from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank

GRADIENTS = "gradients"
PARAMETERS = "parameters"
"""Fields of a step's evidence, fqn -> the rank's slice."""


def ranks_by_distance(trial: Trial, rank: int) -> list[int]:
    """Return all ranks, those first whose mesh coordinates differ from this rank's along the fewest axes but pp.

    Of equally near ones the first stage comes first, so its copy of a tied weight counts. A norm takes each slice from
    the first rank that has it.
    """
    coordinates = {other: coordinate_of_rank(trial.case.dims, other) for other in trial.ranks}
    own = coordinate_of_rank(trial.case.dims, rank)

    def order(other: int) -> tuple[int, int, int]:
        """Return the sort key of a rank: number of axes but pp along which it differs, stage, rank."""
        other_coordinate = coordinates[other]
        differing_axes = sum(own[axis] != index for axis, index in other_coordinate.items() if axis != "pp")
        return (differing_axes, other_coordinate["pp"], other)

    return sorted(coordinates, key=order)


def norm_of_slices(
    trial: Trial,
    step: int,
    ranks: Iterable[int] | None = None,
    fqns: Collection[str] | None = None,
    again: str = "",
    power: float = 2,
    quantity: str = GRADIENTS,
) -> float:
    """Return the 2-norm of the gradients or parameters of these ranks in a step. 0 if none is on record.

    Each slice counts once, with the values of the first of `ranks` that has it (by default ascending). fqns: only
    these. again: an axis; slices count once for each coordinate along it. power: 2; for infinity the largest absolute
    entry is returned. For any other the slices' norms of that power are added up, without a root of the total.
    quantity: GRADIENTS or PARAMETERS.
    """
    sums: dict[object, float] = {}
    slice_of = trial.gradient_slice_of if quantity == GRADIENTS else trial.slice_of
    if ranks is None:
        ranks = sorted(trial.ranks)
    for rank in ranks:
        index = coordinate_of_rank(trial.case.dims, rank).get(again)
        for record in trial.ranks[rank].steps:
            if record.step != step:
                continue
            for fqn, tensor in getattr(record, quantity).items():
                key = fqn, slice_of(rank, fqn), index
                if key not in sums and tensor.size and (fqns is None or fqn in fqns):
                    recorded_squares = record.squares if (quantity, power) == (GRADIENTS, 2) else {}
                    sums[key] = recorded_squares[fqn] if recorded_squares else _sum_of_powers(tensor, power)
    total = max(sums.values(), default=0.0) if power == math.inf else math.fsum(sums.values())
    return math.sqrt(total) if power == 2 else total


def _sum_of_powers(tensor: np.ndarray, power: float) -> float:
    """Return the sum of squares of all entries for power 2, else numpy's norm of that power."""
    values = tensor.ravel().astype(np.float64)
    return float(np.square(values).sum() if power == 2 else np.linalg.norm(values, power))
