"""torchtitan 0.3.0 with spmd_backend "full_dtensor" reports the loss once a data rank too often (torch 2.13; right with 2.15).

`_dist_reduce` takes a DTensor that is Replicate as well as one that is Partial, and sums its local part over the ranks either
way. With torch 2.13 the loss of full_dtensor is Replicate, the sum of all ranks already: on HSDP 2 x 2 four times the loss is
reported. The training is right.

torchrun --nproc-per-node 4 upstream_bugs/torchtitan_full_dtensor_loss.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from torchtitan_accumulation_reduces_every_microbatch import configured


def reported(backend: str) -> float:
    """Return the loss that the first step reports, of the same weights on the same tokens."""
    config = configured()
    config.parallelism.spmd_backend = backend
    config.parallelism.data_parallel_replicate_degree = config.parallelism.data_parallel_shard_degree = 2
    config.training.global_batch_size = 4
    config.debug.seed = 0
    config.metrics.log_freq = 1
    trainer = config.build()
    losses: list[float] = []
    trainer.metrics_processor.log = lambda step, average, *_, **__: losses.append(float(average))
    torch.manual_seed(0)
    trainer.step = 1
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    return losses[0]


def main() -> int:
    (backend,) = sys.argv[1:] or ("full_dtensor",)
    loss = reported(backend)
    uniform = torch.tensor(2048.0).log().item()  # the loss of a model that knows nothing
    if dist.get_rank() == 0:
        print(f"torch {torch.__version__}, {backend}: reports {loss:.3f}, where knowing nothing is {uniform:.3f}")
    dist.destroy_process_group()
    return int(loss > 2 * uniform)


if __name__ == "__main__":
    sys.exit(main())
