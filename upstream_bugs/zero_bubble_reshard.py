"""Zero-bubble schedules lose gradients of FSDP2 parameters that are resharded after forward (torch 2.11 to 2.13).

A backward is halved: I differentiates the input, W the weights. If a forward of another microbatch comes between the two,
reshard_after_forward=True frees the gathered parameters there, and W's gradients go to tensors that are never reduced. With
reshard_after_forward=False, or a schedule with whole backwards, all is right. No error is raised.

torchrun --nproc-per-node 4 upstream_bugs/zero_bubble_reshard.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleavedZeroBubble

MICROBATCHES, DIM = 4, 8


def layer(index: int) -> nn.Module:
    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(DIM, DIM, bias=False, dtype=torch.float64), nn.Tanh())


def loss_of(output: Tensor, target: Tensor) -> Tensor:
    return ((output - target) ** 2).sum()


def gradients(reshard: bool) -> list[Tensor | None]:
    """Return the whole gradients of this rank's two stages, after one pass of the schedule over two FSDP ranks with equal
    data."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    rank, stages = mesh.get_local_rank("pp"), []
    for index in (rank, rank + 2):
        part = fully_shard(layer(index), mesh=mesh["dp"], reshard_after_forward=reshard)
        example = torch.empty(2, DIM, dtype=torch.float64, device="meta", requires_grad=True)
        group = mesh.get_group("pp")
        stages.append(
            PipelineStage(part, index, 4, torch.device("cpu"), input_args=example, output_args=example, group=group)
        )
    schedule = ScheduleInterleavedZeroBubble(stages, MICROBATCHES, loss_fn=loss_of, scale_grads=False)
    torch.manual_seed(7)
    given, target = torch.randn(2, 2 * MICROBATCHES, DIM, dtype=torch.float64)
    schedule.step(*((given,) if rank == 0 else ()), target=target)
    found = [parameter.grad for stage in stages for parameter in stage.submod.parameters()]
    return [None if gradient is None else gradient.full_tensor() for gradient in found]


def main() -> int:
    dist.init_process_group("gloo")
    kept, freed = gradients(reshard=False), gradients(reshard=True)
    wrong = [
        one is None or other is None or not torch.allclose(one, other) for one, other in zip(kept, freed, strict=True)
    ]
    lost = sum(other is None for other in freed)
    print(f"rank {dist.get_rank()}: {sum(wrong)} of {len(wrong)} gradients differ, {lost} are missing", flush=True)
    total = torch.tensor(sum(wrong))
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
