"""picotron's tensor parallel reduces the gradient of one input once per matmul: three times for q, k, v, twice for gate and up.

Backward needs two all-reduces a block, for what attention and feed-forward read, and one for the output. Sums of gradients may
be reduced once; the result is right, and 11 are issued where 5 do: a waste, of 2.2 times the bytes with two blocks.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 upstream_bugs/picotron_tp_reductions.py     exits with 1 if it is so
"""

from __future__ import annotations

import os
import sys
from typing import Any

import picotron_on_cpu as on_cpu
import torch
import torch.distributed as dist

NEEDED = 2 * on_cpu.SIZES["num_hidden_layers"] + 1
issued: list[int] = []
reduce = dist.all_reduce


def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if torch._C._current_graph_task_id() != -1:  # in backward
        issued.append(tensor.numel() * tensor.element_size())
    return reduce(tensor, *args, **kwargs)


if __name__ == "__main__":
    dist.all_reduce = counted
    on_cpu.train(tp=2)
    calls, moved = len(issued) / on_cpu.STEPS, sum(issued) // on_cpu.STEPS
    least = NEEDED * max(issued, default=0)
    if os.environ["RANK"] == "0":
        print(f"backward of a step: {calls:g} all-reduces of {moved} bytes; needed are {NEEDED} of {least}", flush=True)
    sys.exit(int(calls > NEEDED))
