"""A process group of any size that one rank joins alone: torch's "fake" backend, whose collectives do nothing."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist


def join(rank: int, world_size: int) -> None:
    """Join as torchrun's rank of that number would, on machines of one rank, LOCAL_RANK 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    joined = lambda *_, **__: None  # of a trainer that joins itself  # noqa: E731
    dist.init_process_group = dist.distributed_c10d.init_process_group = joined
    dist.distributed_c10d._new_group_with_tag = _as_the_world(dist.distributed_c10d._new_group_with_tag)


def _as_the_world(made: Callable[..., Any]) -> Callable[..., Any]:
    """A group of whatever backend (gloo for objects, beside NCCL) is one of ranks that are not there."""
    taken = inspect.signature(made)

    @functools.wraps(made)
    def instead(*args: Any, **named: Any) -> Any:
        bound = taken.bind(*args, **named)
        bound.arguments |= {
            name: None for name in ("backend", "backend_options", "pg_options") if name in bound.arguments
        }
        return made(*bound.args, **bound.kwargs)

    return instead
