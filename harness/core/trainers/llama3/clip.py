"""Clipping by the global norm: the root of the sum of squares over all parameters, however they are spread."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from harness.reference.model import at_least_float32

Layout = tuple[DeviceMesh | None, tuple[Placement, ...]]


def clip_gradients(
    parameters: list[nn.Parameter],
    max_norm: float | None,
    groups: Iterable[dist.ProcessGroup] = (),
    copies: Collection[nn.Parameter] = (),
) -> float:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), in place, and return their global norm before that.

    max_norm None leaves them. groups: of ranks that hold other elements without a DTensor saying so: other stages of a
    pipeline, other parts of a vector that FSDP1 has flattened. (FSDP1's own clip_grad_norm_ takes no float64.) copies:
    parameters whose gradient is that of one on another rank, which counts it.
    """
    with_gradient = [parameter for parameter in parameters if parameter.grad is not None]
    copy_ids = {*map(id, copies)}
    families = group_by_layout([parameter for parameter in with_gradient if id(parameter) not in copy_ids])
    zero = at_least_float32(torch.zeros((), dtype=parameters[0].dtype, device=parameters[0].device))
    squares = torch.stack([sum_of_squares(family, *layout) for layout, family in families.items()] or [zero]).sum()
    for group in groups:
        dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    if max_norm is not None:
        parts: list[Any] = [Part(gradient) for gradient in local_gradients(with_gradient)]
        torch.nn.utils.clip_grads_with_norm_(parts, max_norm, norm, foreach=False)
    return norm.item()


@dataclass(frozen=True)
class Part:
    """A parameter as torch's clipping takes it: `grad` is the slice of its gradient that lies on this rank."""

    grad: Tensor


def local_gradients(parameters: Iterable[nn.Parameter]) -> list[Tensor]:
    """Return this rank's slices of the gradients; parameters without a gradient are left out.

    Trap: on a mesh of three axes DTensor is slow, half a second for an operator on a gradient and a scalar, or on
    several gradients.
    """
    gradients = [parameter.grad for parameter in parameters]
    return [
        gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for gradient in gradients
        if gradient is not None
    ]


def group_by_layout(parameters: list[nn.Parameter]) -> dict[Layout, list[nn.Parameter]]:
    """Return the parameters by the mesh and placements of their gradients; (None, ()) for plain tensors.

    Trap: one torch operator cannot take DTensors of different meshes.
    """
    families: dict[Layout, list[nn.Parameter]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        layout = (gradient.device_mesh, gradient.placements) if isinstance(gradient, DTensor) else (None, ())
        families.setdefault(layout, []).append(parameter)
    return families


def sum_of_squares(family: list[nn.Parameter], mesh: DeviceMesh | None, placements: tuple[Placement, ...]) -> Tensor:
    """Return the sum of squares of a family's gradients over all ranks, each element once, in at least float32 [].

    It is summed over the axes that cut, not over replicas.
    """
    total = torch.stack([at_least_float32(part).square().sum() for part in local_gradients(family)]).sum()
    for axis, placement in enumerate(placements):
        if mesh is not None and not placement.is_replicate() and mesh.size(axis) > 1:
            dist.all_reduce(total, group=mesh.get_group(axis))
    return total
