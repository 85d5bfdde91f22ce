"""torchtitan 0.3.0 reports a largest loss that is below the mean, under context parallel.

`Trainer.train_step` divides each rank's part of the loss by the rank's own valid tokens. It counts them before context parallel
cuts sequences. So each of two cp ranks divides the loss of its half by the tokens of both. Here the parts are given, to each
rank half of a mean of 6.0, so that both means, and the larger one, are 6.0. The training is right, and so is the mean.

torchrun --nproc-per-node 2 upstream_bugs/torchtitan_largest_loss.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torchtitan_accumulation_reduces_every_microbatch import configured

MEAN = 6.0


def reported() -> tuple[float, float]:
    """The mean and the largest loss of one step."""
    config = configured()
    config.parallelism.context_parallel_degree, config.parallelism.data_parallel_shard_degree = 2, 1
    config.training.global_batch_size, config.metrics.log_freq = 1, 1
    trainer = config.build()
    trainer.forward_backward_step = lambda **_: torch.tensor(MEAN / 2)
    shown: list[tuple[float, float]] = []
    trainer.metrics_processor.log = lambda step, mean, largest, *_, **__: shown.append((float(mean), float(largest)))
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    return shown[0]


def main() -> int:
    mean, largest = reported()
    if dist.get_rank() == 0:
        print(f"of two cp ranks with a loss of {MEAN} each the mean is {mean:.3f}, and the largest {largest:.3f}")
    dist.destroy_process_group()
    return int(largest < mean)


if __name__ == "__main__":
    sys.exit(main())
