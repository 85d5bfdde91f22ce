"""Ring attention on CPU, where torch 2.11 to 2.13 has two gaps.

The ring lacks the operator that SDPA chooses on CPU. Partial results are merged in float32, whatever the model's dtype.
On GPUs nothing is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring

from harness.core.case.case import Case

SEQUENCE = 2  # dim of q, k, v [b, heads, s, head_dim]
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def support_ring(case: Case) -> None:
    """Patch torch's ring attention to take CPU's operator, in this process.

    Partial results are merged in float64 where the case computes in it, else in float32.
    """
    ring._cp_options.convert_to_f32 = (case.training.compute_dtype or case.training.dtype) != "float64"
    handlers: dict[Any, Any] = ring.custom_ops
    handlers |= {FORWARD: _forward, BACKWARD: _backward}


def _forward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Run ring attention's forward with CPU's operator; return its results as DTensors cut along the sequence."""
    names = ("query", "key", "value", "dropout_p", "is_causal")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    mesh = arguments["query"].device_mesh
    results = ring._templated_ring_attention(mesh.get_group(), SEQUENCE, FORWARD, **_local(arguments))
    return _cut_along_sequence(results, mesh)


def _backward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """Run ring attention's backward with CPU's operator; return the gradients of q, k and v as DTensors cut along the
    sequence."""
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    arguments = dict(zip(names, args, strict=False)) | kwargs
    mesh = arguments["query"].device_mesh
    results = ring._templated_ring_attention_backward(
        mesh.get_group(), SEQUENCE, BACKWARD, grad_out_name="grad_out", **_local(arguments)
    )
    return _cut_along_sequence(results, mesh)


def _local(arguments: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in arguments.items()}


def _cut_along_sequence(results: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(result, mesh, [Shard(SEQUENCE)], run_check=False) for result in results)
