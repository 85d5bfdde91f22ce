"""A process group of any size that one rank joins alone: torch's "fake" backend, whose collectives do nothing."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def join_fake_world(rank: int, world_size: int) -> None:
    """Join a fake process group of that size as this rank, on machines of one rank (LOCAL_RANK 0).

    It sets the launcher's variables, makes later calls of init_process_group do nothing, and gives every group the fake
    backend.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    joined = lambda *_, **__: None  # of a trainer that joins itself  # noqa: E731
    dist.init_process_group = dist.distributed_c10d.init_process_group = joined
    dist.distributed_c10d._new_group_with_tag = _with_backend_of_world(dist.distributed_c10d._new_group_with_tag)


def _with_backend_of_world(make_group: Callable[..., Any]) -> Callable[..., Any]:
    """Return `make_group` without its choice of a backend, such as gloo for objects beside NCCL.

    Every group is then of the world's backend, for its other ranks do not exist.
    """
    signature = inspect.signature(make_group)

    @functools.wraps(make_group)
    def make_group_of_world(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords)
        bound.arguments |= {
            name: None for name in ("backend", "backend_options", "pg_options") if name in bound.arguments
        }
        return make_group(*bound.args, **bound.kwargs)

    return make_group_of_world
