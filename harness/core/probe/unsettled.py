"""Gradients that a DTensor's operators left otherwise than their parameters: not summed over a mesh axis yet, or not cut.

Clipping and the optimizer redistribute them. The probe moves nothing between ranks: it notes what is there, and who judges
adds up (harness/core/evidence/unsettled.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from harness.core.evidence.step import UnsettledGradient
from harness.core.probe.structure import local_tensor_of, placement_text, placement_texts


def unsettled_gradients(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, UnsettledGradient]:
    """Return, by fqn, the gradients whose placements differ from their parameter's on the same mesh."""
    unsettled = {}
    for fqn, parameter in parameters:
        gradient = parameter.grad
        mesh = getattr(gradient, "device_mesh", None)
        if gradient is None or mesh is None or mesh != getattr(parameter, "device_mesh", None):
            continue
        of_gradient = tuple(_with_operator(placement) for placement in gradient.placements)
        of_parameter = placement_texts(parameter)
        if of_gradient != of_parameter:
            local_gradient = local_tensor_of(gradient)
            local_parameter = local_tensor_of(parameter)
            size = local_gradient.element_size()
            unsettled[fqn] = UnsettledGradient(
                mesh=mesh.mesh.tolist(),
                placements=of_gradient,
                wanted=of_parameter,
                bytes=local_gradient.numel() * size,
                settled_bytes=local_parameter.numel() * size,
            )
    return unsettled


def _with_operator(placement: Any) -> str:
    """Return a placement's text, of a partial one with what is done to the ranks' tensors: Partial(sum)."""
    text = placement_text(placement)
    return f"{text}({placement.reduce_op})" if hasattr(placement, "reduce_op") else text
