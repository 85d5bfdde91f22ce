"""torch.compile's cache on disk ignores set_rotate_method: code that was compiled for one rotation runs for the other.

The ring of context parallel reads its rotation from a global (`_cp_options.rotate_method`) while a graph is traced. The key
under which AOTAutograd keeps what it compiled does not contain it. So a job that asks for "allgather" runs "alltoall", if one
with "alltoall" was compiled on this machine before. Two ranks each; the second job alone, with a separate folder, is right.

    python upstream_bugs/compile_cache_ignores_cp_rotation.py    exit 1: torch has the bug; 0: it has not
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental._context_parallel import _attention as ring
from torch.distributed.tensor.parallel import parallelize_module
from torch.profiler import ProfilerActivity, profile

ON_CPU = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
MOVERS = {"allgather": "all_gather_into_tensor", "alltoall": "all_to_all_single"}


class Attention(nn.Module):
    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Attention()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x, x, x) * 2


def attend_on_cpu(_: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[DTensor, ...]:
    """torch's ring does not have the operator that attention is on CPUs; to it this one is as that of GPUs."""
    names = ("query", "key", "value", "dropout_p", "is_causal")
    given = dict(zip(names, args, strict=False)) | kwargs
    mesh = given["query"].device_mesh
    local = {name: value.to_local() if isinstance(value, DTensor) else value for name, value in given.items()}
    parts = ring._templated_ring_attention(mesh.get_group(), 2, ON_CPU, **local)
    return tuple(DTensor.from_local(part, mesh, [Shard(2)], run_check=False) for part in parts)


def one_rank(rank: int, store: str, method: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh, block = init_device_mesh("cpu", (2,)), Block()
    torch._inductor.config.compile_threads = 1
    ring.custom_ops[ON_CPU] = attend_on_cpu
    ring.set_rotate_method(method)
    ring._enable_context_parallel_dispatcher()
    parallelize_module(block, mesh, {"inner": ring._ContextParallel(2, ring._ContextParallel.AttentionType.SDPA)})
    block.compile()
    x = torch.ones(1, 2, 8, 8)
    with torch.no_grad():
        block(x)  # compiled, or found in the cache
        with profile(activities=[ProfilerActivity.CPU]) as seen:
            block(x)
    names = [event.key for event in seen.key_averages()]
    if rank == 0:
        print(*(mover for mover, op in MOVERS.items() if any(op in name for name in names)), flush=True)
    dist.destroy_process_group()


def run(method: str, cache: str) -> str:
    """Return the rotation that a job of two ranks really ran."""
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
    command = [sys.executable, __file__, method]
    return subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True).stdout.strip()


if __name__ == "__main__" and len(sys.argv) > 1:
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(one_rank, (f"{folder}/store", sys.argv[1]), 2, start_method="spawn")
elif __name__ == "__main__":
    with tempfile.TemporaryDirectory() as shared, tempfile.TemporaryDirectory() as own:
        first, then, alone = run("alltoall", shared), run("allgather", shared), run("allgather", own)
    print(f"torch {torch.__version__}\n  alltoall requested first:       {first}")
    print(f"  allgather requested after that: {then}\n  allgather requested, own cache: {alone}")
    sys.exit(then != "allgather")
