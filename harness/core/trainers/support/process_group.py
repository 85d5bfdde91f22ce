"""The meeting point of a launch's ranks: torchrun's at the environment's address, the local launcher's at INIT_METHOD,
a file."""

from __future__ import annotations

import os
from typing import Any

import torch.distributed as dist
from torch.distributed import device_mesh, distributed_c10d


def backend_for(device: str) -> str:
    """Return the backend for ranks on this kind of device: gloo also on GPUs, where several ranks share one and NCCL cannot."""
    return os.environ.get("HARNESS_BACKEND") or ("nccl" if device == "cuda" else "gloo")


def join(backend: str) -> None:
    """Enter the process group that RANK, WORLD_SIZE and INIT_METHOD describe."""
    dist.init_process_group(backend, init_method=os.environ.get("INIT_METHOD", "env://"), **_rank_and_world_size())


def redirect() -> None:
    """Patch `init_process_group`, also that of device meshes, to use INIT_METHOD, RANK and WORLD_SIZE in place of its
    arguments.

    It does nothing where INIT_METHOD is not set, as under torchrun.
    """
    if "INIT_METHOD" not in os.environ:
        return
    original = dist.init_process_group
    rendezvous = {"init_method": os.environ["INIT_METHOD"], **_rank_and_world_size()}

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(*args, **{**kwargs, **rendezvous})

    for module in (dist, distributed_c10d, device_mesh):
        module.init_process_group = init_process_group


def _rank_and_world_size() -> dict[str, Any]:
    return {"rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
