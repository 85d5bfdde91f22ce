"""Context parallel: every rank along cp holds some positions of each sample; attention is torch's ring over cp.

Torch's own way is `_ContextParallel` around the module that calls scaled_dot_product_attention, and its dispatcher, which
sends that operator to ring attention. What CPUs lack there is in harness/core/trainers/support/cpu_attention.py. The ring takes
no mask. With packed documents each rank gathers all keys and values first (Llama 3 herd of models, section 3.3.2).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental._attention import set_rotate_method
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer
from torch.distributed.tensor.parallel import parallelize_module

from harness.core.case.case import Case
from harness.core.trainers.support import cpu_attention
from harness.reference.model import Llama

SEQUENCE = 2  # dim of q, k, v [b, heads, s, head_dim]


def apply_context_parallel(model: Llama, mesh: DeviceMesh, case: Case) -> None:
    """Make attention of every layer cover all positions of the cp group, in place. The mesh has the one axis cp.

    With packed documents, attention modules are replaced; else torch's ring attention is switched on, for the whole
    process.
    """
    if case.training.document_mask:
        for layer in model.layers.values():
            layer.attention.inner_attention = GatheredAttention(mesh, load_balance=case.features.cp_load_balance)
        return
    if mesh.device_type == "cpu":
        cpu_attention.support_ring(case)
    set_rotate_method(case.features.cp_rotation)
    ring._enable_context_parallel_dispatcher()
    style = ring._ContextParallel(SEQUENCE, ring._ContextParallel.AttentionType.SDPA)
    for layer in model.layers.values():
        parallelize_module(layer, mesh, {"attention.inner_attention": style})


class GatheredAttention(nn.Module):
    """Causal attention within documents, of this rank's queries to the keys and values of all cp ranks.

    q, k, v: [b, heads, s / cp, head_dim]. documents: int64 [b, s], of the whole row: borders may lie on other ranks.
    """

    def __init__(self, mesh: DeviceMesh, *, load_balance: bool) -> None:
        super().__init__()
        self.mesh = mesh
        self.load_balance = load_balance

    def forward(self, q: Tensor, k: Tensor, v: Tensor, documents: Tensor) -> Tensor:
        k, v = (all_gather_tensor_autograd(keys_or_values, SEQUENCE, self.mesh) for keys_or_values in (k, v))
        parts = positions_of_ranks(documents.shape[1], self.mesh, load_balance=self.load_balance)
        mask = document_mask(documents, parts[self.mesh.get_local_rank()], torch.cat(parts))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask.unsqueeze(1))


def document_mask(documents: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return which keys each query may attend to, earlier ones of its document: bool [b, queries, keys].

    documents: int64 [b, s]. queries, keys: the positions in the row of each, int64.
    """
    same_document = documents[:, queries].unsqueeze(-1) == documents[:, keys].unsqueeze(-2)
    return same_document & (queries.unsqueeze(-1) >= keys)


def within_documents(documents: Tensor) -> Tensor:
    """Return each token's position in its own document, from 0. int64 [b, s]"""
    positions = torch.arange(documents.shape[1], device=documents.device)
    begins_document = F.pad(documents.diff(dim=1) != 0, (1, 0))  # whether a document begins there
    return positions - torch.where(begins_document, positions, 0).cummax(dim=1).values


def positions_of_ranks(sequence: int, mesh: DeviceMesh, *, load_balance: bool) -> list[Tensor]:
    """Return, for each rank along cp, the positions that it holds, in its order: int64 [s / cp]."""
    positions = torch.arange(sequence, device=mesh.device_type)
    if not load_balance:
        return list(positions.chunk(mesh.size()))
    chunks = positions.chunk(2 * mesh.size())
    return [torch.cat((early, late)) for early, late in zip(chunks, reversed(chunks), strict=True)][: mesh.size()]


def shard_sequence(
    tokens: Tensor, labels: Tensor, mesh: DeviceMesh, *, load_balance: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Return this rank's part of a microbatch: tokens, labels int64 [b, s / cp], and their positions int64 [s / cp].

    Load balanced, the sequence is cut into 2 cp chunks, and a rank gets one from the head and its mirror image from the
    tail. The reason: under a causal mask late positions have more to look at. Trap: torch notes in a global whether it
    balanced. The ring reads that global, and is wrong for a batch that was cut elsewhere.
    """
    sequence = tokens.shape[1]
    positions = torch.arange(sequence, device=tokens.device)
    balancer = _HeadTailLoadBalancer(sequence, mesh.size(), tokens.device) if load_balance else None
    parts: list[Any] = ring._context_parallel_shard(mesh, [tokens, labels, positions], [1, 1, 0], balancer)
    return parts[0], parts[1], parts[2]
