"""A job of three ranks on gloo that hangs in a sum that rank 1 leaves out; each rank then dumps its Flight Recorder."""

import contextlib
import os
import sys
import time
from datetime import timedelta

os.environ["TORCH_FR_BUFFER_SIZE"] = "100"

import torch
import torch.distributed as dist

dist.init_process_group("gloo", timeout=timedelta(seconds=2))
rank, numbers = dist.get_rank(), torch.ones(10)
for _ in range(2):
    dist.all_reduce(numbers)
if rank == 1:
    time.sleep(3)
else:
    with contextlib.suppress(RuntimeError):
        dist.all_reduce(numbers)
with open(f"{sys.argv[1]}/nccl_trace_rank_{rank}", "wb") as file:
    file.write(torch._C._distributed_c10d._dump_fr_trace())
os._exit(0)
