"""torchao's MXFP8Linear undoes tensor parallelism: every rank gathers both factors and multiplies them whole.

    python upstream_bugs/mxfp8_linear_gathers_under_tp.py          exit 1: torchao has the bug; 0: it has not

Two ranks run one row-parallel layer, first as nn.Linear, then as torchao's Float8Linear and MXFP8Linear, and count collectives.
Row-parallel work needs one in forward, the sum of the ranks' outputs. Float8Linear also agrees on scales. MXFP8Linear gathers
its input and its weight and sums nothing: the numbers are right, the point of tensor parallelism is lost. Its blocks are made
by a view of the dim that is cut, for which DTensor gathers the tensor. In backward, column-parallel layers do the same. torch
2.13.0, torchao 0.18.0.

Trap: CommDebugMode does not see these gathers; the profiler does.
"""

from __future__ import annotations

import dataclasses
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile
from torchao.float8 import Float8LinearConfig, convert_to_float8_training
from torchao.prototype.moe_training.mxfp8_linear import MXFP8Linear
from torchao.quantization.quantize_.common.kernel_preference import KernelPreference


def layers() -> dict[str, nn.Module]:
    plain = nn.Sequential(nn.Linear(128, 128, bias=False))
    config = dataclasses.replace(Float8LinearConfig.from_recipe_name("rowwise"), emulate=True)
    float8 = convert_to_float8_training(nn.Sequential(nn.Linear(128, 128, bias=False)), config=config)
    mxfp8 = nn.Sequential(MXFP8Linear(128, 128, bias=False, kernel_preference=KernelPreference.EMULATED))
    return {"nn.Linear": plain, "Float8Linear": float8, "MXFP8Linear": mxfp8}


def collectives(layer: nn.Module) -> dict[str, int]:
    """Count the collectives of a forward pass, as functional operators."""
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        layer(torch.ones(32, 64))
    counts = {event.key.removeprefix("_c10d_functional::"): event.count for event in seen.key_averages()}
    return {op: count for op, count in counts.items() if op.startswith(("all_", "reduce_"))}


def work(rank: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))
    for name, layer in layers().items():
        parallelize_module(layer, mesh, {"0": RowwiseParallel(input_layouts=Shard(-1))})
        counts = collectives(layer)
        if rank == 0:
            print(f"{name:<13} collectives in forward: {counts}", flush=True)
    dist.destroy_process_group()
    sys.exit(any(op.startswith("all_gather") for op in counts))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        try:
            mp.start_processes(work, (f"{folder}/store",), nprocs=2, start_method="fork")
        except mp.ProcessExitedException as ended:
            sys.exit(ended.exit_code)
