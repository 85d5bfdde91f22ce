"""torchtitan 0.3.0 does not train the final norm of a pipeline with a zero-bubble schedule: its gradient is lost.

Its default loss applies the output itself, in chunks, and then frees final norm and output (`lm_head.reshard()`). FSDP2 wraps
them even if there is nothing to shard. A schedule that computes the gradients of weights later then asks for those of the
parameters that the module holds by now. Forward used other ones. Cross entropy at once frees nothing.

torchrun --nproc-per-node 2 upstream_bugs/torchtitan_zero_bubble_norm.py             exits with 1 while it is so
torchrun --nproc-per-node 2 upstream_bugs/torchtitan_zero_bubble_norm.py at_once     with cross entropy at once: exits with 0
"""

from __future__ import annotations

import sys
from typing import Any

import titan_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.pipelining.schedules import PipelineScheduleMulti
from torchtitan.models.llama3.config_registry import llama3_debugmodel
from torchtitan_accumulation_reduces_every_microbatch import configured

step = PipelineScheduleMulti.step


def of_microbatches(
    self: Any, *, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **rest: Any
) -> Any:
    """A newer torch's step takes microbatches; that of torch 2.13 cuts what it takes."""
    self._split_inputs = lambda *_: (arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs)
    return step(self, target=torch.cat(target_mbs) if target_mbs else None, **rest)


def untrained(at_once: bool) -> list[str]:
    """Parameters of this rank's stages that one step leaves without a gradient."""
    PipelineScheduleMulti.step = of_microbatches
    config = configured()
    if not at_once:
        config.loss = llama3_debugmodel().loss
    config.parallelism.pipeline_parallel_degree = 2
    config.parallelism.pipeline_parallel_schedule = "InterleavedZeroBubble"
    config.training.local_batch_size = config.training.global_batch_size = 4
    trainer = config.build()
    trainer.step, found = 1, []

    def look(*_: object, **__: object) -> None:
        named = (pair for part in trainer.model_parts for pair in part.named_parameters())
        found.extend(name for name, parameter in named if parameter.grad is None)

    trainer.optimizers.step = look
    trainer.train_step(trainer.batch_generator(trainer.dataloader))
    return found


def main() -> int:
    lost = untrained("at_once" in sys.argv)
    print(f"rank {dist.get_rank()}: without a gradient {', '.join(lost) or 'nothing'}")
    count = torch.tensor(len(lost))
    dist.all_reduce(count)
    dist.destroy_process_group()
    return int(count > 0)


if __name__ == "__main__":
    sys.exit(main())
