"""Context parallel: every rank along cp holds some positions of each sample; attention is torch's ring over cp.

Torch's own way is `_ContextParallel` around the module that calls scaled_dot_product_attention, and its dispatcher, which
sends that operator to ring attention. What CPUs lack there is in harness/trainers/support/cpu_attention.py.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module

from harness.reference.model import Llama
from harness.spec.case import Case
from harness.trainers.support import cpu_attention

SEQUENCE = 2  # dim of q, k, v [b, heads, s, head_dim]


def apply_context_parallel(model: Llama, mesh: DeviceMesh, case: Case) -> None:
    """Attention of every layer looks at all positions of the cp group. The mesh has the one axis cp."""
    if mesh.device_type == "cpu":
        cpu_attention.support_ring(case)
    set_rotate_method(case.features.cp_rotation)
    ring._enable_context_parallel_dispatcher()
    style = ring._ContextParallel(SEQUENCE, ring._ContextParallel.AttentionType.SDPA)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"attention.inner_attention": style})


def shard_sequence(
    tokens: Tensor, labels: Tensor, mesh: DeviceMesh, *, load_balance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part of a microbatch: tokens, labels int64 [b, s / cp], and their positions int64 [s / cp].

    Load balanced, the sequence is cut into 2 cp chunks, and a rank gets one from the head and its mirror image from the
    tail. The reason: under a causal mask late positions have more to look at. Trap: torch notes in a global whether it
    balanced. The ring reads that global, and is wrong for a batch that was cut elsewhere.
    """
    sequence = tokens.shape[1]
    positions = torch.arange(sequence, device=tokens.device)
    balancer = _HeadTailLoadBalancer(sequence, mesh.size(), tokens.device) if load_balance else None
    parts: list[Any] = ring._context_parallel_shard(mesh, [tokens, labels, positions], [1, 1, 0], balancer)
    return parts[0], parts[1], parts[2]
