"""The rank grid: a rank's coordinate in the mesh, and the groups of ranks that differ in some axes only."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping

import numpy as np

from harness.core.case.case import Case
from harness.core.case.dims import AXES, ParallelDims
from harness.core.case.measured import Unit
from harness.core.case.schedule import V_SHAPED
from harness.reference.config import is_trainable


def rank_grid(dims: ParallelDims) -> np.ndarray:
    """Return the rank at each mesh coordinate. int64 [pp, dp_replicate, dp_shard, cp, tp]"""
    return np.arange(dims.world_size).reshape(dims.degrees)


@functools.lru_cache(maxsize=1 << 14)
def coordinate_of_rank(dims: ParallelDims, rank: int) -> Mapping[str, int]:
    """Return the rank's index on every axis, by the axis's name, degree 1 included."""
    indices = np.unravel_index(rank, dims.degrees)
    return {axis: int(index) for axis, index in zip(AXES, indices, strict=True)}


def groups_along(dims: ParallelDims, *axes: str) -> tuple[tuple[int, ...], ...]:
    """Return the groups of ranks that differ only along `axes`, each ascending; a partition of the world."""
    grid = rank_grid(dims)
    axes_last = np.moveaxis(grid, [AXES.index(axis) for axis in axes], range(-len(axes), 0))
    lines = axes_last.reshape(-1, math.prod(getattr(dims, axis) for axis in axes))
    return tuple(tuple(sorted(map(int, line))) for line in lines)


def groups_by_axis(case: Case, units: Iterable[list[Unit]]) -> dict[str, tuple[tuple[int, ...], ...]]:
    """Return the groups of ranks of each axis of degree above 1, by axis, folded axes and those of slices after forward
    included.

    units: FSDP2's units, once for each kind of ranks.
    """
    dims = case.dims
    groups_of = {axis: groups_along(dims, axis) for axis in AXES if getattr(dims, axis) > 1}
    if dims.dp_shard > 1 and dims.cp > 1 and case.data_dims.over_cp:
        groups_of["dp_shard_cp"] = groups_along(dims, "dp_shard", "cp")
    if case.replicate_axis == "dp_replicate_cp":
        groups_of["dp_replicate_cp"] = groups_along(dims, "dp_replicate", "cp")
    if tied_axis(case) == PIPELINE_ENDS:
        groups_of[PIPELINE_ENDS] = tuple((line[0], line[-1]) for line in groups_of["pp"])
    degrees = set[int]()
    for units_of_kind in units:
        degrees.update(unit.degree for unit in units_of_kind)
    for degree in sorted(degrees):
        axis = gather_axis(case, degree)
        if axis not in (shard_axis(case.data_dims), ""):
            groups_of[axis] = _post_forward_groups(groups_of[shard_axis(case.data_dims)], degree)
    return groups_of


PIPELINE_ENDS = "pp_ends"
"""Axis of the first and the last rank of each pipeline. Ranks between them are in none of its groups."""


def tied_axis(case: Case) -> str:
    """Return the axis over which the gradients of a tied embedding's copies are summed: "pp", or "pp_ends" if pp is
    above 2.

    Empty without a pipeline, if a rank has both stages, or if no trained embedding is tied.
    """
    sums = case.model.tied_embeddings and is_trainable(case.training, "tok_embeddings.weight")
    if case.dims.pp == 1 or not sums or case.features.schedule in V_SHAPED:
        return ""
    return PIPELINE_ENDS if case.dims.pp > 2 else "pp"


def gather_axis(case: Case, degree: int) -> str:
    """Return the axis on which backward gathers parameters that stayed cut over `degree` ranks; empty if they stayed whole.

    It is FSDP's shard axis, or "post_forward" with a degree behind it if the wrapper and not the case chose that.
    """
    if case.shards == 1 or degree == 1:
        return ""
    if isinstance(case.features.reshard_after_forward, int):
        return "post_forward"
    return shard_axis(case.data_dims) if degree == case.shards else f"post_forward_{degree}"


def _post_forward_groups(shards: tuple[tuple[int, ...], ...], degree: int) -> tuple[tuple[int, ...], ...]:
    """Return the shard groups cut into groups of `degree` neighbours.

    Each such group holds all parameters between forward and backward.
    """
    neighbours = []
    for group in shards:
        for start in range(0, len(group), degree):
            neighbours.append(group[start : start + degree])
    return tuple(neighbours)


def shard_axis(dims: ParallelDims) -> str:
    """Return the axis that FSDP shards over: "dp_shard", "cp", or "dp_shard_cp", both folded.

    Context parallel ranks hold equal parameters, so FSDP usually shards over them as well.
    """
    if dims.cp == 1 or not dims.over_cp:
        return "dp_shard"
    return "dp_shard_cp" if dims.dp_shard > 1 else "cp"


def shard_degree_and_index(dims: ParallelDims, rank: int) -> tuple[int, int]:
    """Return (degree, index) of a rank in data-parallel sharding, over dp_shard with cp folded in where cp shards."""
    index_by_axis = coordinate_of_rank(dims, rank)
    index = index_by_axis["dp_shard"]
    if dims.over_cp:
        index = index * dims.cp + index_by_axis["cp"]
    return dims.shards, index


def tp_degree_and_index(dims: ParallelDims, rank: int) -> tuple[int, int]:
    """Return (degree, index) of a rank in tensor parallel; (1, 0) without."""
    return dims.tp, coordinate_of_rank(dims, rank)["tp"]
