"""Mistakes in how ranks are arranged and what is sharded over them."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

hsdp_runs_as_fsdp = fault(
    breaks="fully_shard gets the flattened mesh, so HSDP is FSDP over all data-parallel ranks",
    bug="M01 pytorch/torchtitan #711, fixed by #713",
    case="hsdp_2x2",
    caught_by="shard_contents placements traffic memory",
    named="another layout",
    does=op.change_result(".parallelize:data_parallel_mesh", lambda mesh: mesh._flatten("dp")),
)


@fault(
    breaks="fully_shard is never applied: all data-parallel ranks hold whole parameters, as under DDP",
    bug="of the family of M01: another strategy ran than the one requested",
    case="hsdp_2x2",
    caught_by="shard_contents placements traffic memory",
    named="another layout",
)
@partial(op.together, op.skip_call(".parallelize:apply_fsdp"))
@partial(op.instead, ".parallelize:replicate")
def hsdp_runs_as_ddp(original: Any, model: Any, mesh: Any, case: Any) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, process_group=mesh._flatten("dp").get_group())


fsdp_runs_as_ddp = fault(
    breaks="FSDP is requested and DDP wraps the model",
    bug="of the family of M01: another strategy ran than the one requested",
    case="fsdp_2",
    caught_by="shard_contents placements traffic memory",
    named="another layout",
    does=hsdp_runs_as_ddp.apply,
)
tp_not_applied = fault(
    breaks="the tensor-parallel plan is never applied: tp ranks repeat each other's work on whole weights",
    bug="of the family of X01 pytorch/torchtitan #1880: a parallelism requested is silently off",
    case="fsdp_2_tp_2",
    caught_by="shard_contents placements traffic memory exchange",
    named="another layout",
    does=op.skip_call(".parallelize:apply_tensor_parallel"),
)


@fault(
    breaks="the mesh's axes are given innermost first, each with its right name, so tp groups are strided",
    bug="M06 pytorch/torchtitan #288",
    case="fsdp_4_tp_2",
    caught_by="shard_contents placements process_groups traffic samples",
    named="another layout",
)
@partial(op.instead, ".parallelize:init_device_mesh")
def mesh_axes_reversed(original: Any, device_type: str, shape: Any, *, mesh_dim_names: Any) -> Any:
    mesh = original(device_type, tuple(reversed(shape)), mesh_dim_names=tuple(reversed(mesh_dim_names)))
    # FSDP2 wants tp innermost, so the axes are turned round again: right sizes and names, wrong ranks.
    ranks = mesh.mesh.permute(*reversed(range(mesh.mesh.dim())))
    return type(mesh)(device_type, ranks, mesh_dim_names=mesh_dim_names)


@fault(
    breaks="a rank list made by hand strides wrongly, so that two ranks of the grid change places",
    bug="M10 NVIDIA/Megatron-LM e43abe7dfa",
    case="hsdp_2x2",
    caught_by="process_groups placements traffic gradients",
    named="gradients not reduced",
)
@partial(op.instead, ".parallelize:init_device_mesh")
def ranks_change_places_in_the_mesh(original: Any, device_type: str, shape: Any, *, mesh_dim_names: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, [[0, 1], [3, 2]], mesh_dim_names=mesh_dim_names)


def _strategy(name: str) -> Any:
    def changed(_: Any) -> Any:
        from torch.distributed.fsdp import ShardingStrategy

        return ShardingStrategy[name]

    return op.change_result(".parallelize:fsdp1_strategy", changed)


fsdp1_full_shard_of_a_2d_mesh = fault(
    breaks="FSDP1 gets a mesh of two axes with FULL_SHARD, takes the group of the first axis and ignores the second",
    bug="E-class: the strategy is not switched to HYBRID_SHARD when the mesh gets a replicate axis",
    case="fsdp1_2x2",
    caught_by="placements shard_contents traffic gradients",
    named="another layout",
    does=_strategy("FULL_SHARD"),
)


@fault(
    breaks="FSDP1 gets HYBRID_SHARD with shard groups of one rank; it takes NO_SHARD for it, and reduces within that group",
    bug="M11 pytorch #154888; verl-project/verl #7493",
    case="fsdp1_2_no_shard",
    caught_by="traffic gradients replica_agreement",
    named="gradients not reduced",
)
@partial(op.together, _strategy("HYBRID_SHARD"))
@partial(op.change_result, ".parallelize:data_parallel_mesh")
def fsdp1_hybrid_of_shard_groups_of_one(mesh: Any) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))
