"""Context parallel: every rank along cp holds some positions of each sample; attention is torch's ring over cp.

Torch's own way is `_ContextParallel` around the module that calls scaled_dot_product_attention, and its dispatcher, which
sends that operator to ring attention. On CPU two things are missing from it (torch 2.11 to 2.13): the operator that SDPA
chooses there is unknown to the ring, and partial results are merged in float32, whatever the model's dtype.
`teach_cpu_attention` puts both right; on GPUs nothing is touched.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module

from harness.spec.case import Case
from reference.model import Llama

SEQUENCE = 2  # dim of q, k, v [b, heads, s, head_dim]
FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default


def apply_context_parallel(model: Llama, mesh: DeviceMesh, case: Case) -> None:
    """Attention of every layer looks at all positions of the cp group. The mesh has the one axis cp."""
    if mesh.device_type == "cpu":
        teach_cpu_attention(exact=(case.training.compute_dtype or case.training.dtype) == "float64")
    set_rotate_method(case.features.cp_rotation)
    ring._enable_context_parallel_dispatcher()
    style = ring._ContextParallel(SEQUENCE, ring._ContextParallel.AttentionType.SDPA)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"attention.inner_attention": style})


def shard_sequence(
    tokens: Tensor, labels: Tensor, mesh: DeviceMesh, *, load_balance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a microbatch: tokens, labels int64 [b, s / cp], and their positions int64 [s / cp].

    Load balanced, the sequence is cut into 2 cp chunks and a rank gets one from the head and its mirror image from the
    tail, as under a causal mask late positions have more to look at. Trap: torch notes in a global whether it balanced,
    and the ring, which asks that global, is wrong for a batch that was cut elsewhere.
    """
    sequence = tokens.shape[1]
    positions = torch.arange(sequence, device=tokens.device)
    balancer = _HeadTailLoadBalancer(sequence, mesh.size(), tokens.device) if load_balance else None
    parts: list[Any] = ring._context_parallel_shard(mesh, [tokens, labels, positions], [1, 1, 0], balancer)
    return parts[0], parts[1], parts[2]


# ---- CPU


def teach_cpu_attention(*, exact: bool) -> None:
    """Ring attention for the operator that SDPA chooses on CPU; exact: partial results are merged in float64."""
    ring._cp_options.convert_to_f32 = not exact
    handlers: dict[Any, Any] = ring.custom_ops
    handlers |= {FORWARD: _forward, BACKWARD: _backward}


def _forward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    names = ("query", "key", "value", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    mesh = given["query"].device_mesh
    results = ring._templated_ring_attention(mesh.get_group(), SEQUENCE, FORWARD, **_local(given))
    return _cut_along_sequence(results, mesh)


def _backward(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    names = ("grad_out", "query", "key", "value", "out", "logsumexp", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    mesh = given["query"].device_mesh
    results = ring._templated_ring_attention_backward(
        mesh.get_group(), SEQUENCE, BACKWARD, grad_out_name="grad_out", **_local(given)
    )
    return _cut_along_sequence(results, mesh)


def _local(given: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to_local() if isinstance(value, DTensor) else value for name, value in given.items()}


def _cut_along_sequence(results: tuple[Tensor, ...], mesh: DeviceMesh) -> tuple[DTensor, ...]:
    return tuple(DTensor.from_local(result, mesh, [Shard(SEQUENCE)], run_check=False) for result in results)
