"""Faults of how ranks are arranged, what is sharded over them, what FSDP wraps, and what it frees after forward."""

from __future__ import annotations

from functools import partial
from typing import Any

from harness.faults import fault
from harness.faults import operators as op

SHARD = ".parallelize:fully_shard"
STRATEGY = ".parallelize:fsdp1_strategy"

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
    """Return the model in DDP over all data-parallel ranks."""
    from torch.nn.parallel import DistributedDataParallel

    return DistributedDataParallel(model, process_group=mesh._flatten("dp").get_group())


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
    """Return a mesh of the right sizes and names whose axes vary in the opposite order: the first one fastest."""
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
    """Return the 2 x 2 mesh of ranks [[0, 1], [3, 2]]."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(device_type, [[0, 1], [3, 2]], mesh_dim_names=mesh_dim_names)


@fault(
    breaks="FSDP1 gets HYBRID_SHARD with shard groups of one rank; it takes NO_SHARD for it, and reduces within that group",
    bug="M11 pytorch #154888; verl-project/verl #7493",
    case="fsdp1_2_no_shard",
    caught_by="traffic gradients replica_agreement",
    named="gradients not reduced",
)
@partial(op.together, op.change_result(STRATEGY, lambda strategy: type(strategy).HYBRID_SHARD))
@partial(op.change_result, ".parallelize:data_parallel_mesh")
def fsdp1_hybrid_of_shard_groups_of_one(mesh: Any) -> Any:
    """Return a mesh in which each rank is a shard group of its own."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh(mesh.device_type, mesh.mesh.reshape(-1, 1), mesh_dim_names=("dp_replicate", "dp_shard"))


def _is_block(unit: Any, **_: Any) -> bool:
    return hasattr(unit, "ffn_norm")


def _is_root(unit: Any, **_: Any) -> bool:
    return hasattr(unit, "tok_embeddings")


# ---- what is freed

last_unit_freed_after_forward = fault(
    breaks="every unit is freed after forward, the last one too, which backward needs at once",
    bug="H01 pytorch/torchtitan #1094, #1091, #822",
    case="fsdp_4",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=True),
)
nothing_freed_after_forward = fault(
    breaks="set_reshard_after_forward(False) is left on: parameters stay gathered from forward to backward",
    bug="H02 pytorch/torchtitan #4143",
    case="fsdp_4_reshard_always",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=False),
)
replicas_keep_different_units = fault(
    breaks="the second replica keeps its blocks gathered, as a policy set by a node's free memory would",
    bug="of the family of H01 pytorch/torchtitan #1094: which units are kept is decided in another way than meant",
    case="hsdp_2x2_open",
    caught_by="placements",
    named="ranks disagree on units",
    does=op.on_rank((2, 3), op.override_argument(SHARD, reshard_after_forward=False, when=_is_block)),
)
first_unit_kept_instead_of_last = fault(
    breaks="the last unit is looked for by name and not found, so the first is kept in its stead",
    bug="H01 pytorch/torchtitan #1094: the default kept another unit than the last",
    case="fsdp_4",
    caught_by="reshard traffic",
    named="other units",
    does=op.together(
        op.override_argument(
            SHARD, reshard_after_forward=False, when=lambda unit, **_: hasattr(unit, "num_embeddings")
        ),
        op.override_argument(SHARD, reshard_after_forward=True, when=lambda unit, **_: isinstance(unit, list)),
    ),
)
stages_resharded_after_each_microbatch = fault(
    breaks="under pp every stage is freed after each microbatch, as it is right without pp",
    bug="H01 pytorch/torchtitan #822: under pp each microbatch gathered everything anew",
    case="pp_2_fsdp_2",
    caught_by="reshard traffic",
    named="another policy after forward",
    does=op.override_argument(SHARD, reshard_after_forward=True, when=lambda unit, **_: not _is_root(unit)),
)


# ---- what is wrapped


whole_model_is_one_unit = fault(
    breaks="the policy that wraps blocks finds none, so that the whole model is one FSDP unit",
    bug="H03 huggingface/accelerate #3999",
    case="fsdp_4_reshard_always",
    caught_by="reshard traffic",
    named="other units",
    does=op.skip_call(SHARD, when=lambda unit, **_: not _is_root(unit)),
)
fsdp1_hybrid_runs_as_full_shard = fault(
    breaks="FSDP1 gets all data-parallel ranks as one group, so HYBRID_SHARD is FULL_SHARD over them",
    bug="M01 pytorch/torchtitan #711, with FSDP1",
    case="fsdp1_2x2",
    caught_by="shard_contents placements traffic memory",
    named="another layout",
    does=op.together(
        hsdp_runs_as_fsdp.apply,
        op.change_result(STRATEGY, lambda strategy: type(strategy).FULL_SHARD),
        op.instead(".parallelize:flat_group", lambda original, mesh, case: mesh._flatten("dp").get_group()),
    ),
)
