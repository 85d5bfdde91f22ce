"""A checkpointed block whose recomputation ends at a collective leaks its result in every step (torch 2.11 to 2.15).

Recomputation stops as soon as the last tensor that backward needs is saved again. Here that is a mask, drawn after a
row-parallel product was reduced. The reduction is issued again, but its result is not used, so nothing waits for it. torch's
registry of functional collectives keeps it for ever. With `early_stop=False` the mask is applied, and that waits.
pytorch/torchtitan #2763 reports the same under full activation checkpointing.

torchrun --nproc-per-node 2 upstream_bugs/checkpointing_unwaited_collective.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import _get_work_registry_size
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

DIM, STEPS = 64, 4


class Masked(nn.Module):
    """Dropout, written out."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (torch.rand(x.shape) >= 0.1)


def unwaited(block: nn.Module, early_stop: bool) -> list[int]:
    """Return, after each step, how many collectives since the first one have not been waited for."""
    before, found = _get_work_registry_size(), []
    for _ in range(STEPS):
        x = torch.randn(8, DIM, requires_grad=True)
        with set_checkpoint_early_stop(early_stop):
            checkpoint(block, x, use_reentrant=False).sum().backward()
        found.append(_get_work_registry_size() - before)
    return found


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    block = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM), Masked())
    parallelize_module(block, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    whole, stopped = unwaited(block, early_stop=False), unwaited(block, early_stop=True)
    if dist.get_rank() == 0:
        print(
            f"collectives that nobody waited for: {stopped} after each step; {whole} with early_stop=False", flush=True
        )
    dist.destroy_process_group()
    return int(any(stopped))


if __name__ == "__main__":
    sys.exit(main())
