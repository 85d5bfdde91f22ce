"""FSDP1 with HYBRID_SHARD over shard groups of one rank reduces no gradients (torch 2.13).

Groups of one shard nothing, so FSDP1 takes NO_SHARD in place of HYBRID_SHARD, and says so. NO_SHARD all-reduces over the shard
group, which is that one rank. Nothing runs over the replicate group. So each rank trains a separate model, by half of its
gradient. It happens by a mesh of [ranks, 1], and without a mesh on one device a node. Reported as pytorch #154888 and verl
#7493.

torchrun --nproc-per-node 2 upstream_bugs/fsdp1_hybrid_of_one.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy


def gradient(strategy: ShardingStrategy, *shape: int) -> float:
    """Return the gradient of the weight of w * x. Rank 0 receives x = 1 and rank 1 receives x = 3: their mean is 2."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[: len(shape)])
    model = FullyShardedDataParallel(
        nn.Linear(1, 1, bias=False),
        device_mesh=mesh,
        sharding_strategy=strategy,
        use_orig_params=True,
        device_id=torch.device("cpu"),
    )
    model(torch.tensor([[1.0 + 2 * dist.get_rank()]])).sum().backward()
    return float(next(model.parameters()).grad)


def main() -> int:
    dist.init_process_group("gloo")
    plain, hybrid = gradient(ShardingStrategy.NO_SHARD, 2), gradient(ShardingStrategy.HYBRID_SHARD, 2, 1)
    print(f"rank {dist.get_rank()}: gradient {plain} with NO_SHARD, {hybrid} with HYBRID_SHARD of 2 x 1", flush=True)
    dist.destroy_process_group()
    return int(hybrid != plain)


if __name__ == "__main__":
    sys.exit(main())
