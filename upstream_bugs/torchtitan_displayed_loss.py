"""torchtitan from #2963 to #3159 (2026-04-27 to 05-17) reports one data rank's share of the loss under dp x tp.

Where tensor parallel leaves logits sharded, the loss is a DTensor over tp. `dist_sum(loss, mesh)` then adds it up over tp only,
not over the data ranks of its mesh. So each data rank shows its own part of the mean. The training is right.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 4 upstream_bugs/torchtitan_displayed_loss.py     exits with 1 if it is so
"""

from __future__ import annotations

import sys

import titan_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel
from torchtitan.components.loss import cross_entropy_loss
from torchtitan.distributed.utils import dist_sum

SAMPLES, LENGTH, WORDS = 4, 8, 16


def main() -> int:
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    logits, labels = torch.randn(SAMPLES, LENGTH, WORDS), torch.randint(WORDS, (SAMPLES, LENGTH))
    one_device = float(cross_entropy_loss(logits, labels) / labels.numel())
    mine = slice(mesh["dp"].get_local_rank(), None, 2)
    with loss_parallel():
        apart = distribute_tensor(logits[mine], mesh["tp"], [Shard(2)])
        loss = cross_entropy_loss(apart, labels[mine]) / labels.numel()
    shown = dist_sum(loss, mesh["dp"])
    print(f"rank {dist.get_rank()}: reports {shown:.6f}, the mean of all samples is {one_device:.6f}", flush=True)
    dist.destroy_process_group()
    return int(abs(shown / one_device - 1) > 1e-4)


if __name__ == "__main__":
    sys.exit(main())
