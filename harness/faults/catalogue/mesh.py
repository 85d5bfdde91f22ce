"""Mistakes in how ranks are arranged and what is sharded over them."""

from __future__ import annotations

from typing import Any

from harness.faults import Fired, fault, replace


@fault(
    breaks="fully_shard gets the flattened mesh, so HSDP is FSDP over all data-parallel ranks",
    bug="M01 pytorch/torchtitan #711, fixed by #713",
    case="hsdp_2x2",
    caught_by="shard_contents placements traffic memory",
    named="HSDP ran as FSDP",
)
def hsdp_runs_as_fsdp(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def flattened(mesh: Any) -> Any:
            fired()
            return original(mesh)._flatten("dp")

        return flattened

    replace(parallelize, "data_parallel_mesh", make)


@fault(
    breaks="the mesh's axes are given innermost first, each with its right name, so tp groups are strided",
    bug="M06 pytorch/torchtitan #288",
    case="fsdp_4_tp_2",
    caught_by="shard_contents placements process_groups traffic samples",
    named="axes in the wrong order",
)
def mesh_axes_reversed(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def make(original: Any) -> Any:
        def reversed_mesh(device_type: str, shape: Any, *, mesh_dim_names: Any) -> Any:
            fired()
            mesh = original(device_type, tuple(reversed(shape)), mesh_dim_names=tuple(reversed(mesh_dim_names)))
            # FSDP2 wants tp innermost, so the axes are turned round again: right sizes and names, wrong ranks.
            ranks = mesh.mesh.permute(*reversed(range(mesh.mesh.dim())))
            return type(mesh)(device_type, ranks, mesh_dim_names=mesh_dim_names)

        return reversed_mesh

    replace(parallelize, "init_device_mesh", make)


@fault(
    breaks="fully_shard is never applied: all data-parallel ranks hold whole parameters, as under DDP",
    bug="of the family of M01: another strategy ran than the one requested",
    case="hsdp_2x2",
    caught_by="shard_contents placements traffic memory",
    named="HSDP ran as DDP",
)
def hsdp_runs_as_ddp(fired: Fired) -> None:
    from torch.nn.parallel import DistributedDataParallel

    from harness.trainers.llama3 import parallelize

    def keep_whole(model: Any, mesh: Any, case: Any) -> None:
        fired()

    def wrap(model: Any, mesh: Any, case: Any) -> Any:
        return DistributedDataParallel(model, process_group=mesh._flatten("dp").get_group())

    replace(parallelize, "apply_fsdp", lambda original: keep_whole)
    replace(parallelize, "replicate", lambda original: wrap)


@fault(
    breaks="FSDP is requested and DDP wraps the model",
    bug="of the family of M01: another strategy ran than the one requested",
    case="fsdp_2",
    caught_by="shard_contents placements traffic memory",
    named="FSDP ran as DDP",
)
def fsdp_runs_as_ddp(fired: Fired) -> None:
    hsdp_runs_as_ddp.apply(fired)


@fault(
    breaks="the tensor-parallel plan is never applied: tp ranks repeat each other's work on whole weights",
    bug="of the family of X01 pytorch/torchtitan #1880: a parallelism requested is silently off",
    case="fsdp_2_tp_2",
    caught_by="shard_contents placements traffic memory",
    named="TP not applied",
)
def tp_not_applied(fired: Fired) -> None:
    from harness.trainers.llama3 import parallelize

    def leave_alone(model: Any, mesh: Any, features: Any) -> None:
        fired()

    replace(parallelize, "apply_tensor_parallel", lambda original: leave_alone)
