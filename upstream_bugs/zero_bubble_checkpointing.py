"""Zero-bubble schedules compute a checkpointed block again for every group of its weights (torch 2.11 to 2.13).

The second half of a backward calls torch.autograd.grad for each group of weights that share an intermediate. Every such call
enters the checkpointed block anew, which computes all of it again. Gradients are right, but activation checkpointing costs many
forwards a microbatch where a whole backward (1F1B) costs one.

torchrun --nproc-per-node 2 upstream_bugs/zero_bubble_checkpointing.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble

MICROBATCHES, DIM = 4, 8


class Block(nn.Module):
    """Four weights; counts how often it is computed."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ModuleList(nn.Linear(DIM, DIM, bias=False) for _ in range(4))
        self.computed = 0

    def forward(self, x: Tensor) -> Tensor:
        self.computed += 1
        for weight in self.weights:
            x = torch.tanh(weight(x))
        return x


def computed(kind: type) -> int:
    """How often this rank's second block is computed in one pass: once forward and once again for each microbatch is right."""
    rank, stages, blocks = dist.get_rank(), [], []
    for index in (rank, rank + 2):
        block = Block()
        blocks.append(block)
        example = torch.empty(2, DIM, device="meta", requires_grad=True)
        part = nn.Sequential(checkpoint_wrapper(block))
        stages.append(PipelineStage(part, index, 4, torch.device("cpu"), input_args=example, output_args=example))
    schedule = kind(stages, MICROBATCHES, loss_fn=lambda output, target: (output - target).square().sum())
    given, target = torch.randn(2, 2 * MICROBATCHES, DIM)
    schedule.step(*((given,) if rank == 0 else ()), target=target)
    return blocks[1].computed


def main() -> int:
    dist.init_process_group("gloo")
    whole, halves = computed(ScheduleInterleaved1F1B), computed(ScheduleInterleavedZeroBubble)
    print(
        f"rank {dist.get_rank()}: computed for {MICROBATCHES} microbatches: 1F1B {whole}, zero bubble {halves}",
        flush=True,
    )
    total = torch.tensor(halves - 2 * MICROBATCHES)
    dist.all_reduce(total)
    dist.destroy_process_group()
    return int(total > 0)


if __name__ == "__main__":
    sys.exit(main())
