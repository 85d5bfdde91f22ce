"""torch.compile after a row-wise parallel embedding with a sharded output: backward raises.

RowwiseParallel(output_layouts=Shard(1)) reduces the embedding's partial sums in a hook after forward, and returns the
DTensor's local tensor: the result of DTensor's own autograd function. A compiled module that takes it as its input
raises in backward: 'Tensor' object has no attribute '_local_tensor'. Cloned once, the same tensor is fine.

    python upstream_bugs/compile_rowwise_embedding.py            exit 1: torch has the bug; 0: it has not
"""

from __future__ import annotations

import os
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 16, bias=False)
        self.down = nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(self.norm(x)))


def one_rank(rank: int, store: str, clone: bool, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    embedding, block = nn.Embedding(16, 8), Block()
    parallelize_module(embedding, mesh, RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)))
    plan = {
        "norm": SequenceParallel(),
        "up": ColwiseParallel(input_layouts=Shard(1)),
        "down": RowwiseParallel(output_layouts=Shard(1)),
    }
    parallelize_module(block, mesh, plan)
    block.compile(backend="aot_eager", fullgraph=True)
    x = embedding(torch.arange(8).reshape(2, 4))
    try:
        block(x.clone() if clone else x).sum().backward()
        told = "ok"
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
    with open(f"{results}.{rank}", "w") as file:
        file.write(told)
    dist.destroy_process_group()


def run(clone: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_rank, (f"{folder}/store", clone, f"{folder}/told"), 2, start_method="fork")
        with open(f"{folder}/told.0") as file:
            return file.read()


if __name__ == "__main__":
    plain, cloned = run(clone=False), run(clone=True)
    print(f"torch {torch.__version__}\n  as it comes: {plain}\n  cloned:      {cloned}")
    sys.exit(plain != "ok")
