"""DDP that outlives its gloo group can hang the process when it is freed (torch 2.13).

`destroy_process_group()` leaves DDP's reducer as the last owner of the group. When the reducer is freed, it frees the group
while it holds the GIL, and the group's destructor joins its threads. One of these may be about to free the last all-reduce,
with Python objects of the thread that issued it, and waits for the GIL. In gdb: one thread in take_gil under
~AsyncAllreduceWork under ProcessGroupGloo::runLoop, the main thread in std::thread::join under ~ProcessGroupGloo under
~Reducer. So ends a function that has DDP as a local variable, calls destroy_process_group() and returns. pytorch/pytorch #56297
describes such destructors; #154976 gives up the GIL only where Python frees the group itself.

python upstream_bugs/gloo_group_freed_by_ddp.py     the watchdog ends it with 1 while the bug is there
"""

from __future__ import annotations

import faulthandler
import tempfile

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

ATTEMPTS = 600


def train(store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    model = DistributedDataParallel(torch.nn.Linear(20, 1))
    model(torch.randn(4, 20)).sum().backward()
    dist.destroy_process_group()  # and as this function returns, the model is freed


if __name__ == "__main__":
    print(
        "WRONG where this is followed by a timeout in a line that calls train(): it only frees what train() held",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as folder:
        for attempt in range(ATTEMPTS):
            faulthandler.dump_traceback_later(20, exit=True)
            train(f"{folder}/{attempt}")
    faulthandler.cancel_dump_traceback_later()
    print(f"not seen: {ATTEMPTS} times DDP was freed after its group")
