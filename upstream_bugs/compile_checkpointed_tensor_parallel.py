"""torch.compile of checkpointed, tensor-parallel attention: forward raises, for it would save a DeviceMesh for backward.

Attention is made tensor parallel, then wrapped by checkpoint_wrapper, then compiled, in torchtitan's order. Without the
checkpoint, or without the compiler, it is fine.

    python upstream_bugs/compile_checkpointed_tensor_parallel.py      exit 1: torch has the bug; 0: it has not
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
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, parallelize_module


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return self.o(nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def one_rank(rank: int, store: str, checkpointed: bool, compiled: bool, results: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    block: nn.Module = Attention()
    plan = dict.fromkeys("qkv", ColwiseParallel()) | {"o": RowwiseParallel(output_layouts=Shard(1))}
    parallelize_module(block, mesh, plan)
    whole = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    parallelize_module(block, mesh, whole)
    block = checkpoint_wrapper(block) if checkpointed else block
    if compiled:
        block.compile(backend="aot_eager", fullgraph=True)
    try:
        block(torch.randn(2, 2, 8, requires_grad=True)).sum().backward()
        told = "ok"
    except Exception as error:
        told = f"{type(error).__name__}: {error}".splitlines()[0]
    with open(f"{results}.{rank}", "w") as file:
        file.write(told)
    dist.destroy_process_group()


def run(checkpointed: bool, compiled: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        arguments = (f"{folder}/store", checkpointed, compiled, f"{folder}/told")
        mp.start_processes(one_rank, arguments, 2, start_method="fork")
        with open(f"{folder}/told.0") as file:
            return file.read()


if __name__ == "__main__":
    print(f"torch {torch.__version__}")
    print(f"  checkpointed:              {run(checkpointed=True, compiled=False)}")
    print(f"  compiled:                  {run(checkpointed=False, compiled=True)}")
    both = run(checkpointed=True, compiled=True)
    print(f"  checkpointed and compiled: {both}")
    sys.exit(both != "ok")
