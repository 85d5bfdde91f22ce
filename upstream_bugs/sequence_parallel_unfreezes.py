"""SequenceParallel trains what is frozen: it makes parameters anew, and forgets requires_grad (torch 2.13).

The other styles of tensor parallel keep it since pytorch #171709, which left this one out.

torchrun --nproc-per-node 2 upstream_bugs/sequence_parallel_unfreezes.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import ColwiseParallel, SequenceParallel, parallelize_module


def main() -> int:
    dist.init_process_group("gloo")
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)).requires_grad_(False)
    parallelize_module(model, init_device_mesh("cpu", (2,)), {"0": SequenceParallel(), "1": ColwiseParallel()})
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    print(f"rank {dist.get_rank()}: all were frozen; trained are {trained or 'none'}")
    dist.destroy_process_group()
    return int(bool(trained))


if __name__ == "__main__":
    sys.exit(main())
