"""Clipping by the global norm: the root of the sum of squares over all parameters, however they are spread."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from reference.model import at_least_float32


def clip_gradients(parameters: list[nn.Parameter], max_norm: float | None) -> float:
    """Scale gradients by min(1, max_norm / (norm + 1e-6)), in place; None leaves them. Returns the norm before that."""
    families = by_mesh(parameters)
    norms = [mesh_norm([p.grad for p in family if p.grad is not None]) for family in families]
    norm = torch.stack(norms).square().sum().sqrt()
    if max_norm is not None:
        for family in families:
            torch.nn.utils.clip_grads_with_norm_(family, max_norm, norm)
    return norm.item()


def by_mesh(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    """Trap: one torch operator cannot take DTensors of different meshes, nor DTensors beside plain tensors."""
    families: dict[DeviceMesh | None, list[nn.Parameter]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            mesh = parameter.grad.device_mesh if isinstance(parameter.grad, DTensor) else None
            families.setdefault(mesh, []).append(parameter)
    return list(families.values())


def mesh_norm(gradients: list[Tensor]) -> Tensor:
    """The norm over all ranks, in at least float32. Trap: on DTensors it is partial until full_tensor()."""
    norm = torch.nn.utils.get_total_norm([at_least_float32(gradient) for gradient in gradients])
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
