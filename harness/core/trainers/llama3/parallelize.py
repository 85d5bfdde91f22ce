"""Parallelism applied to an unmodified model, from outside: tensor parallel first, then FSDP2 or DDP around it.

Every function here can be replaced by name, which is how deliberate faults get in.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.replicate import replicate as composable_replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import CustomPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from harness.core.case.case import Case
from harness.core.case.dims import AXES
from harness.core.case.features import Features
from harness.core.trainers.llama3 import context, lora, recompute
from harness.reference.model import Llama, freeze

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
DATA_AXES = ("dp_replicate", "dp_shard")  # ranks along these see different samples
LOSS_AXES = (*DATA_AXES, "cp")  # ranks along these see different tokens


# ---- the mesh


def build_mesh(case: Case, device_type: str) -> DeviceMesh | None:
    """Return the rank grid over the axes of degree > 1, outermost first. None if there is no such axis.

    FSDP2 takes a mesh of two axes for HSDP, also where each replica is one rank: then dp_shard is there with degree 1.
    """
    dims = case.dims
    lone_shards = case.wrapper == "fsdp2" and dims.dp_shard * dims.cp == 1
    axes = [axis for axis in AXES if getattr(dims, axis) > 1 or (axis == "dp_shard" and lone_shards)]
    if not axes:
        return None
    return init_device_mesh(device_type, tuple(getattr(dims, axis) for axis in axes), mesh_dim_names=tuple(axes))


def axes_of(mesh: DeviceMesh | None) -> tuple[str, ...]:
    """Return the names of the mesh's axes. Empty without a mesh."""
    return mesh.mesh_dim_names or () if mesh is not None else ()


def data_parallel_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh that fully_shard gets: (dp_replicate, dp_shard) for HSDP, dp_shard alone for FSDP.

    With cp, dp_shard and cp are flattened into one axis, whose ranks share the shards of a parameter. Trap: flattening
    dp_replicate and dp_shard gives FSDP over all of them, with the same numbers (torchtitan #711).
    """
    if "cp" not in axes_of(mesh):
        return mesh[tuple(axis for axis in DATA_AXES if axis in axes_of(mesh))]
    shards = mesh["dp_shard", "cp"]._flatten("dp_shard_cp") if "dp_shard" in axes_of(mesh) else mesh["cp"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], shards]) if "dp_replicate" in axes_of(mesh) else shards


def data_parallel_rank(mesh: DeviceMesh | None) -> int:
    """Return the index of this rank's share of a batch, 0 to dp - 1. Peers along other axes have the same."""
    rank = 0
    for axis in DATA_AXES:
        if mesh is not None and axis in axes_of(mesh):
            rank = rank * mesh[axis].size() + mesh.get_local_rank(axis)
    return rank


def sum_over_data_ranks(value: Tensor, mesh: DeviceMesh | None) -> Tensor:
    """Sum a value over all ranks with different tokens, in place, and return it.

    Afterwards it is the same on each of them. It takes one all_reduce for each axis that divides the tokens.
    """
    for axis in LOSS_AXES:
        if mesh is not None and axis in axes_of(mesh):
            dist.all_reduce(value, group=mesh.get_group(axis))
    return value


# ---- the model


def shard(model: Llama, mesh: DeviceMesh | None, case: Case) -> None:
    """Apply tp, freezing, cp, checkpointing, compile and FSDP2 to the model, in place, as the case requests.

    Parameters become DTensors that hold this rank's slice. The model may be on the meta device. Trap: torch's
    SequenceParallel makes parameters anew, which are then trained whatever they were; so freezing comes after tp.
    """
    if mesh is not None and "tp" in axes_of(mesh):
        apply_tensor_parallel(model, mesh["tp"], case.features)
    freeze(model, case.training)
    if mesh is not None and "cp" in axes_of(mesh):
        context.apply_context_parallel(model, mesh["cp"], case)
    recompute.apply_checkpointing(model, case)
    recompute.apply_compile(model, mesh, case)
    if mesh is not None and case.wrapper == "fsdp2":
        apply_fsdp(model, data_parallel_mesh(mesh), case)


def replicate(model: Llama, mesh: DeviceMesh | None, case: Case) -> nn.Module:
    """Return the model, which has its weights, in DDP, replicate or FSDP1; the model itself with another wrapper or alone.

    DDP and replicate broadcast their first rank's weights.
    """
    wrap = {"ddp": apply_ddp, "replicate": apply_replicate, "fsdp1": apply_fsdp1}.get(case.wrapper or "")
    return wrap(model, data_parallel_mesh(mesh), case) if wrap is not None and mesh is not None else model


def apply_ddp(model: nn.Module, mesh: DeviceMesh, case: Case) -> nn.Module:
    return DistributedDataParallel(model, **ddp_options(mesh, case))


def apply_replicate(model: nn.Module, mesh: DeviceMesh, case: Case) -> nn.Module:
    """Apply the composable DDP to the model and return the same object.

    Its set-up and broadcast happen in the first forward.
    """
    return composable_replicate(model, **ddp_options(mesh, case))


def ddp_options(mesh: DeviceMesh, case: Case) -> dict[str, Any]:
    """Return the keyword arguments of DDP: the dp_replicate group, no broadcast of buffers, and the case's bucket size
    in MB."""
    size = case.features.bucket_mb
    bucket = {} if size is None else {"bucket_cap_mb": size}
    return {"process_group": mesh.get_group("dp_replicate"), "broadcast_buffers": False, **bucket}


def apply_fsdp1(model: Llama, mesh: DeviceMesh, case: Case) -> nn.Module:
    """Return the model in FSDP1. Units: each block, and the root with all the rest, which is never freed after forward.

    Trap: on CPU it needs the device, or it looks for an accelerator. A policy by class would wrap a checkpointed block
    inside its checkpoint.
    """
    blocks = set(model.layers.values())
    return FullyShardedDataParallel(
        model,
        device_mesh=mesh,
        sharding_strategy=fsdp1_strategy(case),
        auto_wrap_policy=CustomPolicy(lambda module: module in blocks),
        use_orig_params=True,
        device_id=torch.cuda.current_device() if mesh.device_type == "cuda" else torch.device("cpu"),
    )


def flat_group(mesh: DeviceMesh | None, case: Case) -> dist.ProcessGroup | None:
    """Return the group of ranks over which FSDP1 cuts its flat parameters.

    None with another wrapper, or without dp_shard.
    """
    sharded = mesh is not None and case.wrapper == "fsdp1" and case.dims.dp_shard > 1
    return mesh.get_group("dp_shard") if mesh is not None and sharded else None


def fsdp1_strategy(case: Case) -> ShardingStrategy:
    """Return FSDP1's strategy: whether and how it shards, and whether it frees parameters after forward."""
    keep = case.features.reshard_after_forward == "never"
    if case.dims.dp_shard == 1:
        return ShardingStrategy.NO_SHARD
    if case.dims.dp_replicate == 1:
        return ShardingStrategy.SHARD_GRAD_OP if keep else ShardingStrategy.FULL_SHARD
    return ShardingStrategy._HYBRID_SHARD_ZERO2 if keep else ShardingStrategy.HYBRID_SHARD


def apply_tensor_parallel(model: Llama, mesh: DeviceMesh, features: Features) -> None:
    """Cut the model over tp as Megatron does, in place: column-wise into heads and SwiGLU, row-wise out.

    Embedding and output are cut over the vocabulary. With sequence parallel, norms and the residual stream are split
    over the sequence, dim 1. Adapters are cut to fit their matrices.
    """
    adapters = lora.take_out_adapters(model)
    parallelize_module(model, mesh, outer_plan(features, tied=model.config.tied_embeddings))
    for layer in model.layers.values():
        parallelize_module(layer, mesh, layer_plan(features))
    lora.put_back(model, adapters, mesh)


def outer_plan(features: Features, *, tied: bool = False) -> dict[str, ParallelStyle]:
    """Return torch's parallel styles of embedding, final norm and output, by module.

    The norm only with sequence parallel. With loss parallel the logits stay split over the vocabulary, as DTensors.
    """
    between = Shard(1) if features.sequence_parallel else Replicate()
    logits = Shard(-1) if features.loss_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=between),
        "output": tied_output(between, logits)
        if tied
        else ColwiseParallel(input_layouts=between, output_layouts=logits, use_local_output=not features.loss_parallel),
    }
    return plan | ({"norm": SequenceParallel()} if features.sequence_parallel else {})


def tied_output(between: Placement, logits: Placement) -> ParallelStyle:
    """Return the style of a tied output, which is called with the embedding's weight as a DTensor.

    That weight's rows are the logits' columns.
    """
    return PrepareModuleInputOutput(
        input_layouts=(between, None),
        desired_input_layouts=(Replicate(), None),
        output_layouts=Shard(-1),
        desired_output_layouts=logits,
        use_local_output=logits.is_replicate(),
    )


def layer_plan(features: Features) -> dict[str, ParallelStyle]:
    """Return torch's parallel styles of one TransformerBlock, by module.

    Attention is called with (x, positions, documents); the latter two are None or whole on every rank.
    """
    between = Shard(1) if features.sequence_parallel else Replicate()
    plan: dict[str, ParallelStyle] = {
        "attention": PrepareModuleInput(
            input_layouts=(between, None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "attention.wq": ColwiseParallel(),
        "attention.wk": ColwiseParallel(),
        "attention.wv": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=between),
        "feed_forward": PrepareModuleInput(input_layouts=(between,), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=between),
        "feed_forward.w3": ColwiseParallel(),
    }
    norms = ("attention_norm", "ffn_norm") if features.sequence_parallel else ()
    return plan | {norm: SequenceParallel() for norm in norms}


def apply_fsdp(model: Llama, mesh: DeviceMesh, case: Case) -> None:
    """Apply FSDP2 to the model, in place.

    Units: tok_embeddings; each block; norm with output; last, as it must, the root. Norm and output are one unit
    because backward needs them first. Tied embeddings go into that unit: the output reads the embedding's weight, which
    must be whole then. In a pipeline the first stage has them as a unit, and the last stage in the root's. Trap: the
    last stage never calls the embedding's module, so no unit but the root's is gathered for it.
    """
    policy = mixed_precision(case)
    reshard = case.features.reshard_after_forward
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if case.features.cpu_offload else OffloadPolicy()
    everywhere: dict[str, Any] = {"mesh": mesh, "mp_policy": policy, "offload_policy": offload}
    if reshard == "default" and case.dims.pp > 1:
        reshard = "never"  # or every microbatch would gather everything anew
    after_most = reshard if isinstance(reshard, int) else reshard != "never"
    after_last = reshard if isinstance(reshard, int) else reshard == "always"
    units: list[nn.Module | None] = [*model.layers.values()]
    last: list[nn.Module | None] = [model.norm, model.output]
    if case.model.tied_embeddings and case.dims.pp == 1:
        last.insert(0, model.tok_embeddings)
    elif not case.model.tied_embeddings or model.output is None:
        units.insert(0, model.tok_embeddings)
    for unit in without_missing(units):
        fully_shard(unit, reshard_after_forward=after_most, **everywhere)
    if last_unit := without_missing(last):
        fully_shard(last_unit, reshard_after_forward=after_last, **everywhere)
    keeps_tied = case.model.tied_embeddings and case.dims.pp > 1
    fully_shard(model, reshard_after_forward=after_most if keeps_tied else None, **everywhere)


def without_missing(modules: list[nn.Module | None]) -> list[nn.Module]:
    """Return the modules that are not None: a pipeline stage lacks some."""
    return [module for module in modules if module is not None]


def mixed_precision(case: Case) -> MixedPrecisionPolicy:
    """Return FSDP2's policy of dtypes; None in it means the recipe's dtype.

    By default gradients are reduced in the dtype in which they are computed, which torch 2.15 needs stated.
    """
    param = case.training.compute_dtype
    reduce = case.features.reduce_dtype or param
    return MixedPrecisionPolicy(
        param_dtype=DTYPES[param] if param else None, reduce_dtype=DTYPES[reduce] if reduce else None
    )


# ---- what a forward and backward pass needs


@contextmanager
def gradient_sync(model: nn.Module, features: Features, *, last: bool) -> Iterator[None]:
    """Reduce gradients in the block's backward only if `last`.

    With defer_sync "all_reduce", only replicas' reduction waits for it. Trap: DDP decides in the forward pass, so this
    must be around both.
    """
    switch = "all_reduce" if features.defer_sync == "all_reduce" else "gradient_sync"
    set_sync: Any = getattr(model, f"set_requires_{switch}", None)  # FSDP2's and replicate's
    if set_sync is not None:
        set_sync(last)
    if isinstance(model, (DistributedDataParallel, FullyShardedDataParallel)) and not last:
        with model.no_sync():
            yield
    else:
        yield


@contextmanager
def loss_context(mesh: DeviceMesh | None, features: Features) -> Iterator[None]:
    """Let cross_entropy take logits split along the vocabulary, without gathering them, if tp uses loss parallel.

    It must be around backward too.
    """
    with loss_parallel() if "tp" in axes_of(mesh) and features.loss_parallel else nullcontext():
        yield


def settle_gradients(parameters: list[nn.Parameter]) -> None:
    """Redistribute every gradient, in place, to its parameter's placements. Plain tensors are left alone.

    FSDP2 does this itself. With TP alone torch leaves two kinds undone. Norms' gradients under sequence parallel are
    Partial: each rank holds the gradient of its part of the sequence. tok_embeddings' gradient is whole on every rank.
    Clipping and optimizer still come out right, as they go through DTensor. But local values are not the gradient,
    memory is wasted, and AdamW sums each norm's gradient three times over.
    """
    for parameter in parameters:
        if isinstance(parameter, DTensor) and isinstance(parameter.grad, DTensor):
            parameter.grad = parameter.grad.redistribute(placements=parameter.placements)
