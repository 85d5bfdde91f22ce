"""Faults of the global norm of gradients, and of clipping by it."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

SYNC = ".parallelize:gradient_sync"
CLIP = "torch.nn.utils:clip_grads_with_norm_"

# ---- the norm


def _sum_again_over(axis: str) -> Any:
    """Return the operator that sums squares of gradients over an axis once more, if ranks along it hold the same tensor."""

    def replicated(family: Any, mesh: Any = None, placements: Any = ()) -> bool:
        names = mesh.mesh_dim_names if mesh is not None else ()
        return axis in names and placements[names.index(axis)].is_replicate()

    def again(original: Any, family: Any, mesh: Any, placements: Any) -> Any:
        import torch.distributed as dist

        total = original(family, mesh, placements)
        dist.all_reduce(total, group=mesh.get_group(axis))
        return total

    return op.instead(".clip:sum_of_squares", again, when=replicated)


def _own_norm(parameters: Any) -> float:
    return sum(float(parameter.grad.to_local().square().sum()) for parameter in parameters) ** 0.5


norm_summed_over_replicas = fault(
    breaks="the gradient norm is summed over replicas too, so that HSDP clips harder than FSDP",
    bug="C04 ByteDance-Seed/VeOmni #862",
    case="hsdp_2x2",
    caught_by="grad_norm update",
    named="clipped by another norm",
    does=_sum_again_over("dp_replicate"),
)
replicated_parameters_counted_tp_times = fault(
    breaks="parameters that are whole on every tp rank are counted tp times in the gradient norm",
    bug="C06 deepspeedai/DeepSpeed #5411; NVIDIA/Megatron-LM #5916",
    case="tp_2",
    caught_by="grad_norm update",
    named="clipped by another norm",
    does=_sum_again_over("tp"),
)


@fault(
    breaks="the reported gradient norm is that of the rank's own shards, clipping is right",
    bug="C02 pytorch/torchtitan #766, #769; pytorch #170862",
    case="fsdp_2",
    caught_by="grad_norm",
    named="wrong report",
)
@partial(op.instead, ".clip:clip_gradients")
def displayed_norm_is_local(original: Any, parameters: Any, *rest: Any) -> float:
    """Clip correctly. Return the norm of this rank's own shards."""
    norm = _own_norm(parameters)
    original(parameters, *rest)
    return norm


@fault(
    breaks="gradients are clipped by the norm of the rank's own shards, which is also reported",
    bug="of the family of C02: baidu-baige/LoongForge #152, hiyouga/LlamaFactory #10640",
    case="fsdp_4",
    caught_by="grad_norm update",
    named="clipped by another norm",
)
@partial(op.instead, ".clip:clip_gradients")
def clipped_by_the_norm_of_own_shards(original: Any, parameters: Any, max_norm: float, *_: Any) -> float:
    """Clip this rank's shards by their own norm, and return it."""
    norm = _own_norm(parameters)
    for parameter in parameters:
        parameter.grad.to_local().mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


# ---- clipping


def _without_norms_on_later_tp_ranks(parts: Any) -> Any:
    """Return the parameters without vectors on odd ranks. Ranks of the case are ordered with tp innermost, of degree 2."""
    import torch.distributed as dist

    return [part for part in parts if part.grad.dim() != 1 or dist.get_rank() % 2 == 0]


@fault(
    breaks="the clip coefficient is max(1, c) instead of min(1, c): small gradients are enlarged, large ones left",
    bug="C05 deepspeedai/DeepSpeed #5150",
    case="fsdp_4_high_clip",
    caught_by="update",
    named="clipping enlarges gradients",
)
@partial(op.instead, CLIP)
def clipping_enlarges(original: Any, parameters: Any, max_norm: float, total_norm: Any, **_: Any) -> None:
    """Multiply gradients by max(1, c), where c is the coefficient of clipping."""
    for parameter in parameters:
        parameter.grad.mul_(max(1.0, max_norm / (float(total_norm) + 1e-6)))


clipped_without_the_1e_6 = fault(
    breaks="clipping multiplies by max_norm / norm, without the 1e-6 that torch adds to the norm",
    bug="of the family of C05 deepspeedai/DeepSpeed #5150: another coefficient than torch's",
    case="fsdp_2",
    caught_by="update",
    named="clipped without 1e-6",
    does=op.change_argument(CLIP, total_norm=lambda norm: norm - 1e-6),
)
replicated_parameters_clipped_on_tp_rank_0_only = fault(
    breaks="parameters that are whole on every tp rank are clipped on tp rank 0 only",
    bug="C07 deepspeedai/DeepSpeed #1801 (BLOOM-176B)",
    case="fsdp_2_tp_2",
    caught_by="update replica_agreement",
    named="clipping left out",
    does=op.change_argument(CLIP, parameters=_without_norms_on_later_tp_ranks),
)


@fault(
    breaks="accumulated gradients are clipped after every microbatch, requested once a step",
    bug="E-class: a norm of a part of the batch",
    case="ddp_2_accum",
    caught_by="gradients",
    named="clipped in every microbatch",
)
@partial(op.instead, SYNC)
@contextmanager
def clipped_in_every_microbatch(original: Any, model: Any, *rest: Any, **last: bool) -> Any:
    """Yield within the original; after each microbatch but the last, clip the gradients to a norm of 1."""
    with original(model, *rest, **last):
        yield
    if not last["last"]:
        op.make_call("torch.nn.utils:clip_grad_norm_", model.parameters(), 1.0)()
