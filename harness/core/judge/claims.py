"""The slice of a parameter that a rank claims to hold, by a DTensor's mesh and placements, where no values show it."""

from __future__ import annotations

import numpy as np

from harness.core.evidence.records import TensorEvidence
from harness.core.plan.slices import Slice, chunk_interval


def claimed_slice(rank: int, tensor: TensorEvidence) -> Slice | None:
    """Return the slice that a DTensor's mesh and placements claim, as intervals by dim.

    It is the whole tensor for a plain one, and for a rank outside the mesh. None if the slice's shape is not the
    value's.
    """
    intervals = [(0, size) for size in tensor.global_shape]
    for dim, parts, index in _cuts_of_tensor(rank, tensor):
        intervals[dim] = chunk_interval(intervals[dim], parts, index)
    shape = tuple(stop - start for start, stop in intervals)
    return tuple(intervals) if shape == tensor.value.shape else None


def _cuts_of_tensor(rank: int, tensor: TensorEvidence) -> list[tuple[int, int, int]]:
    """Return (dim, number of parts, index of the part) of each cut, in the order in which the tensor is cut.

    Strided shards come last, the innermost mesh axis first. Empty for a plain tensor, or for a rank outside the mesh.
    """
    mesh = np.array(tensor.mesh if tensor.mesh is not None else [])
    if rank not in mesh:
        return []
    mesh_coordinate = np.argwhere(mesh == rank)[0]
    axes = list(zip(tensor.placements, mesh.shape, mesh_coordinate.tolist(), strict=True))
    plain = [
        (_dim_of_placement(placement), size, index) for placement, size, index in axes if placement.startswith("Shard")
    ]
    strided = [
        (_dim_of_placement(placement), size, index)
        for placement, size, index in axes
        if placement.startswith("StridedShard")
    ]
    return plain + strided[::-1]


def _dim_of_placement(placement: str) -> int:
    """Return the tensor dim of a shard's placement as it is recorded: 1 for "Shard(1)"."""
    return int(placement.split("(")[1].rstrip(")"))
