"""The gradient of a row-parallel embedding is whole on every rank, and of another shape than the weight (torch 2.11 to 2.13).

The weight is Shard(0) over tp, its gradient Replicate(): the ranks together hold it tp times. Optimizers cut it again, so
that numbers are right; memory is not what sharding promises. FSDP2 around it cuts it at once.

torchrun --nproc-per-node 2 upstream_bugs/rowwise_embedding_gradient.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import RowwiseParallel, SequenceParallel, parallelize_module


def main() -> int:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.Embedding(8, 4), nn.LayerNorm(4))
    plan = {
        "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "1": SequenceParallel(use_local_output=True),
    }
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    model(torch.arange(8).reshape(2, 4)).square().sum().backward()
    weight = model[0].weight
    assert isinstance(weight, DTensor) and isinstance(weight.grad, DTensor)
    ours, gradient = weight.to_local().shape, weight.grad.to_local().shape
    print(
        f"rank {dist.get_rank()}: weight {tuple(ours)} {weight.placements}, gradient {tuple(gradient)} {weight.grad.placements}"
    )
    dist.destroy_process_group()
    return int(ours != gradient)


if __name__ == "__main__":
    sys.exit(main())
