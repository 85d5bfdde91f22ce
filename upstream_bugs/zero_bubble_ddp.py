"""Zero-bubble schedules do not reduce gradients of stages wrapped in DDP (torch 2.11 to 2.13).

DDP reduces from hooks of gradient accumulation in backward. The halves of a split backward compute gradients by
torch.autograd.grad and add them to .grad by hand. So no hook runs except on the first stage, and replicas diverge. No error is
raised. With whole backwards (1F1B) the same program is right.

torchrun --nproc-per-node 4 upstream_bugs/zero_bubble_ddp.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.nn.parallel import DistributedDataParallel

MICROBATCHES, DIM = 4, 8


def layer(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(DIM, DIM, bias=False, dtype=torch.float64), nn.Tanh())


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def replicas_differ(kind: type) -> int:
    """How many of this rank's gradients are not those of its replica, which received other data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, replica, stages = mesh.get_local_rank("pp"), mesh.get_local_rank("dp"), []
    for index in (rank, rank + 2):
        part = DistributedDataParallel(layer(index), process_group=mesh.get_group("dp"))
        example = torch.empty(2, DIM, dtype=torch.float64, device="meta", requires_grad=True)
        group = mesh.get_group("pp")
        stages.append(
            PipelineStage(part, index, 4, torch.device("cpu"), input_args=example, output_args=example, group=group)
        )
    schedule = kind(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    torch.manual_seed(replica)
    given, target = torch.randn(2, 2 * MICROBATCHES, DIM, dtype=torch.float64)
    schedule.step(*((given,) if rank == 0 else ()), target=target)
    wrong = 0
    for gradient in (parameter.grad for stage in stages for parameter in stage.submod.parameters()):
        both = [torch.empty_like(gradient) for _ in range(2)]
        dist.all_gather(both, gradient, group=mesh.get_group("dp"))
        wrong += not torch.equal(*both)
    return wrong


def main() -> int:
    dist.init_process_group("gloo")
    whole, halves = replicas_differ(ScheduleInterleaved1F1B), replicas_differ(ScheduleInterleavedZeroBubble)
    print(
        f"rank {dist.get_rank()}: replicas' gradients differ: 1F1B {whole} of 2, zero bubble {halves} of 2", flush=True
    )
    total = torch.tensor(halves)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
