"""accelerate on CPU ignores that FSDP was requested, and runs DDP without a word (accelerate 1.15).

AcceleratorState reads its FSDP plugin for every kind of accelerator but MULTI_CPU. torch's FSDP2 itself runs on CPU with gloo.
transformers' TrainingArguments(fsdp=True, use_cpu=True) comes down to the same.

torchrun --nproc-per-node 2 upstream_bugs/accelerate_cpu_fsdp.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from torch.distributed.tensor import DTensor


def main() -> int:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    model = torch.nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    prepared, _ = accelerator.prepare(model, optimizer)
    sharded = all(isinstance(parameter, DTensor) for parameter in prepared.parameters())
    print(f"requested FSDP2: {type(prepared).__name__}, parameters sharded: {sharded}", flush=True)
    accelerator.end_training()
    return int(not sharded)


if __name__ == "__main__":
    sys.exit(main())
