"""A process group of any size that one rank joins alone: torch's "fake" backend, whose collectives do nothing."""

from __future__ import annotations

import os

import torch.distributed as dist


def join(rank: int, world_size: int) -> None:
    """As that rank of torchrun's, on machines of one rank's LOCAL_RANK 0."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(world_size), "LOCAL_RANK": "0"}
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    dist.init_process_group = dist.distributed_c10d.init_process_group = lambda *_, **__: (
        None
    )  # of a trainer that joins itself
