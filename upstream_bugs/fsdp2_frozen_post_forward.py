"""FSDP2 that reshards to fewer ranks keeps what forward left of a frozen unit, which backward never gathers (torch 2.13).

With reshard_after_forward=2 over four ranks each unit is cut over two ranks behind forward. Backward gathers a unit, and frees
that. No gradient comes to frozen units before the first trained one: their larger slices are kept until the next forward pass.

torchrun --nproc-per-node 4 upstream_bugs/fsdp2_frozen_post_forward.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import gc
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

SIZE = 64


def main() -> int:
    dist.init_process_group("gloo")
    model = nn.Sequential(*(nn.Linear(SIZE, SIZE, bias=False) for _ in range(4)))
    model[:3].requires_grad_(False)
    for layer in model:
        fully_shard(layer, reshard_after_forward=2)
    fully_shard(model)
    model(torch.ones(2, SIZE)).sum().backward()
    halves = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.numel() == SIZE * SIZE // 2]
    if dist.get_rank() == 0:
        print(f"after backward {len(halves)} tensors of half a weight are there; a rank's slice is a quarter")
    dist.destroy_process_group()
    return int(bool(halves))


if __name__ == "__main__":
    sys.exit(main())
