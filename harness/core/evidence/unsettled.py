"""Gradients in the placements of their parameters, as clipping and the optimizer use them, summed from the ranks of a mesh.

A DTensor's operators may leave a gradient partial: each rank has a summand. Or it is whole on every rank, and its parameter
is cut. Redistributing it to the parameter's placements gives the gradient that the optimizer uses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import UnsettledGradient

PARTIAL_SUM = "Partial(sum)"
PARTIAL_MEAN = "Partial(avg)"


def with_settled_gradients(ranks: Mapping[int, RankEvidence]) -> dict[int, RankEvidence]:
    """Return, by rank, the evidence of ranks that have unsettled gradients, with these in the placements of their
    parameters.

    Ranks without any are left out. A gradient stays as it is where another rank's part is not there, or where it is to
    be gathered.
    """
    settled = {}
    for rank, evidence in ranks.items():
        if any(step.unsettled for step in evidence.steps):
            settled[rank] = _with_settled_steps(ranks, rank)
    return settled


def _with_settled_steps(ranks: Mapping[int, RankEvidence], rank: int) -> RankEvidence:
    """Return a rank's evidence with each unsettled gradient that can be computed replaced by the settled one."""
    steps = []
    for step in ranks[rank].steps:
        gradients = dict(step.gradients)
        for fqn, lies in step.unsettled.items():
            settled = _settle_gradient(ranks, rank, step.step, fqn, lies)
            if settled is not None:
                gradients[fqn] = settled
        steps.append(dataclasses.replace(step, gradients=gradients))
    return dataclasses.replace(ranks[rank], steps=tuple(steps))


def _settle_gradient(
    ranks: Mapping[int, RankEvidence], rank: int, step: int, fqn: str, lies: UnsettledGradient
) -> np.ndarray | None:
    """Return the rank's gradient in the placements of its parameter. None where it cannot be computed.

    lies: how the rank's gradient lies now.
    """
    mesh = np.array(lies.mesh)
    if rank not in mesh:
        return None
    coordinate = [int(index) for index in np.argwhere(mesh == rank)[0]]
    parts = [_gradient_of_peer(ranks, peer, step, fqn, lies) for peer in ranks_of_partial_sum(lies, rank)]
    known = [part for part in parts if part is not None]
    if len(known) < len(parts) or len({part.shape for part in known}) > 1:
        return None
    value = known[0] if len(known) == 1 else np.sum(known, axis=0, dtype=known[0].dtype)
    for axis, (placement, wanted) in enumerate(zip(lies.placements, lies.wanted, strict=True)):
        if placement == PARTIAL_MEAN:
            value = value / value.dtype.type(mesh.shape[axis])
        if placement == wanted:
            continue
        if placement not in (PARTIAL_SUM, PARTIAL_MEAN, "Replicate"):
            return None
        if wanted.startswith("Shard("):
            value = _chunk_of_dim(value, int(wanted[6:-1]), mesh.shape[axis], coordinate[axis])
        elif wanted != "Replicate":
            return None
    return value


def ranks_of_partial_sum(lies: UnsettledGradient, rank: int) -> list[int]:
    """Return the ranks whose partial gradients add up to this rank's gradient, itself among them.

    It is the rank alone if nothing is partial. Precondition: the rank is in the gradient's mesh.
    """
    mesh = np.array(lies.mesh)
    coordinate = np.argwhere(mesh == rank)[0]
    axes = [
        slice(None) if placement in (PARTIAL_SUM, PARTIAL_MEAN) else index
        for placement, index in zip(lies.placements, coordinate, strict=True)
    ]
    return [int(peer) for peer in np.atleast_1d(mesh[tuple(axes)]).reshape(-1)]


def _gradient_of_peer(
    ranks: Mapping[int, RankEvidence], peer: int, step: int, fqn: str, lies: UnsettledGradient
) -> np.ndarray | None:
    """Return a rank's gradient of a parameter. None if it is not there, is not unsettled, or has other placements than
    `lies`.
    """
    steps = ranks[peer].steps if peer in ranks else ()
    record = next((record for record in steps if record.step == step), None)
    if record is None or fqn not in record.unsettled or record.unsettled[fqn].placements != lies.placements:
        return None
    return record.gradients.get(fqn)


def _chunk_of_dim(value: np.ndarray, dim: int, parts: int, index: int) -> np.ndarray:
    """Return one part of a dim as torch.chunk cuts it: all have the first one's length, but the last ones may be
    shorter or empty.
    """
    size = value.shape[dim]
    length = -(-size // parts)  # rounded up
    start = min(index * length, size)
    stop = min((index + 1) * length, size)
    return np.take(value, range(start, stop), dim)
