"""Where a rank stands in the mesh, and the groups of ranks that differ in some axes only."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from harness.core.case.case import Case
from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.measured import Unit
from harness.core.case.schedule import V_SHAPED
from harness.reference.config import trains


def rank_grid(dims: ParallelDims) -> np.ndarray:
    """int64 [pp, dp_replicate, dp_shard, cp, tp]: the rank at each place of the mesh."""
    return np.arange(dims.world_size).reshape(dims.degrees)


@functools.lru_cache(maxsize=1 << 14)
def coordinate(dims: ParallelDims, rank: int) -> Mapping[str, int]:
    """The rank's index on every axis, by the axis's name, degree 1 included."""
    place = np.unravel_index(rank, dims.degrees)
    return {axis: int(index) for axis, index in zip(AXES, place, strict=True)}


def groups(dims: ParallelDims, *axes: str) -> tuple[tuple[int, ...], ...]:
    """The groups of ranks that differ only along `axes`, each ascending; a partition of the world."""
    grid = rank_grid(dims)
    moved = np.moveaxis(grid, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
    lines = moved.reshape(-1, math.prod(getattr(dims, axis) for axis in axes))
    return tuple(tuple(sorted(int(rank) for rank in line)) for line in lines)


def groups_by_axis(case: Case, units: Iterable[list[Unit]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of each axis of degree above 1, folded ones and those of slices after forward included."""
    dims = case.dims
    found = {axis: groups(dims, axis) for axis in AXES if getattr(dims, axis) > 1}
    if dims.dp_shard > 1 and dims.cp > 1 and case.data_dims.over_cp:
        found["dp_shard_cp"] = groups(dims, "dp_shard", "cp")
    if case.replicate_axis == "dp_replicate_cp":
        found["dp_replicate_cp"] = groups(dims, "dp_replicate", "cp")
    if tied_axis(case) == ENDS:
        found[ENDS] = tuple((line[0], line[-1]) for line in found["pp"])
    for degree in sorted({unit.degree for mine in units for unit in mine}):
        if (axis := gathered_over(case, degree)) not in (shard_axis(case.data_dims), ""):
            found[axis] = _post_forward_groups(found[shard_axis(case.data_dims)], degree)
    return found


ENDS = "pp_ends"
"""Axis of the first and the last rank of each pipeline. Ranks between them are in none of its groups."""


def tied_axis(case: Case) -> str:
    """The axis over which the copies of a tied embedding lie, of which the gradients are summed; empty where a rank has both
    stages, or nothing is summed."""
    sums = case.model.tied_embeddings and trains(case.training, "tok_embeddings.weight")
    if case.dims.pp == 1 or not sums or case.features.schedule in V_SHAPED:
        return ""
    return ENDS if case.dims.pp > 2 else "pp"


def gathered_over(case: Case, degree: int) -> str:
    """The axis on which backward gathers what stayed cut over `degree` ranks; empty if it stayed whole."""
    if case.shards == 1 or degree == 1:
        return ""
    if isinstance(case.features.reshard_after_forward, int):
        return "post_forward"
    return shard_axis(case.data_dims) if degree == case.shards else f"post_forward_{degree}"


def _post_forward_groups(shards: tuple[tuple[int, ...], ...], degree: int) -> tuple[tuple[int, ...], ...]:
    """Neighbours in a shard group, `degree` of them: each such group holds all parameters between forward and backward."""
    return tuple(group[start : start + degree] for group in shards for start in range(0, len(group), degree))


def shard_axis(dims: ParallelDims) -> str:
    """Context parallel ranks hold equal parameters, so FSDP usually shards over them as well."""
    if dims.cp == 1 or not dims.over_cp:
        return "dp_shard"
    return "dp_shard_cp" if dims.dp_shard > 1 else "cp"


def shard_place(dims: ParallelDims, rank: int) -> tuple[int, int]:
    """(degree, index) of data-parallel sharding."""
    at = coordinate(dims, rank)
    return dims.shards, at["dp_shard"] * dims.cp + at["cp"] if dims.over_cp else at["dp_shard"]


def tp_place(dims: ParallelDims, rank: int) -> tuple[int, int]:
    """(degree, index) of tensor parallel."""
    return dims.tp, coordinate(dims, rank)["tp"]
