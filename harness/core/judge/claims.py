"""Which slice of a parameter a rank claims to hold, where no values tell it: by a DTensor's mesh and placements."""

from __future__ import annotations

import numpy as np

from harness.core.evidence.records import TensorEvidence
from harness.core.plan.slices import Slice, chunk


def claimed_slice(rank: int, tensor: TensorEvidence) -> Slice | None:
    """What is no DTensor is whole. None where what is claimed does not have the shape of what is there."""
    intervals = [(0, size) for size in tensor.global_shape]
    for dim, parts, index in _cuts(rank, tensor):
        intervals[dim] = chunk(intervals[dim], parts, index)
    shape = tuple(stop - start for start, stop in intervals)
    return tuple(intervals) if shape == tensor.value.shape else None


def _cuts(rank: int, tensor: TensorEvidence) -> list[tuple[int, int, int]]:
    """(dim, parts, which of them), in the order in which they are cut: a strided shard after those inside of it."""
    mesh = np.array(tensor.mesh if tensor.mesh is not None else [])
    if rank not in mesh:
        return []
    at = np.argwhere(mesh == rank)[0]
    axes = list(zip(tensor.placements, mesh.shape, at.tolist(), strict=True))
    plain = [(_dim(kind), n, i) for kind, n, i in axes if kind.startswith("Shard")]
    strided = [(_dim(kind), n, i) for kind, n, i in axes if kind.startswith("StridedShard")]
    return plain + strided[::-1]


def _dim(kind: str) -> int:
    return int(kind.split("(")[1].rstrip(")"))
