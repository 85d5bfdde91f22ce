"""torchtitan 0.3.0 reduces gradients over the data ranks after every microbatch of an accumulation, not after the last only.

Its loop calls forward and backward gradient_accumulation_steps times and never FSDP2's set_requires_gradient_sync, so that
a step with n microbatches scatters every gradient n times. No option defers it. The numbers are right, and so is the memory
(gradients stay sharded between microbatches): it is n times the traffic that fits no case that requests one reduction.

torchrun --nproc-per-node 2 upstream_bugs/torchtitan_accumulation_reduces_every_microbatch.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys
import tempfile
from typing import Any

import titan_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from torch.distributed.fsdp._fully_shard import _fsdp_collectives
from torch.profiler import ProfilerActivity, profile
from torchtitan.components.loss import CrossEntropyLoss
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3.config_registry import llama3_debugmodel

LENGTH, MICROBATCHES = 16, 2
SCATTERS = ("c10d::_reduce_scatter_base_", "c10d::reduce_scatter_")

divide_factors, init = _fsdp_collectives._get_gradient_divide_factors, dist.init_process_group
_fsdp_collectives._get_gradient_divide_factors = lambda scatter, reduce, dtype, *_: divide_factors(
    scatter, reduce, dtype, "mtia"
)  # gloo cannot average
dist.init_process_group = lambda *_, **__: init("gloo")


class Component:
    """Stands in a configuration for what it builds."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def build(self, **_: Any) -> Any:
        return self.made

    def to_dict(self) -> dict[str, Any]:
        return {}


class Batches:
    def __iter__(self) -> Any:
        while True:
            tokens = torch.randint(0, 2000, (1, LENGTH))
            yield {"input": tokens}, tokens

    def state_dict(self) -> dict[str, Any]:
        return {}


def configured() -> Any:
    """Small, on CPU, of random tokens; the rest as torchtitan has it."""
    config = llama3_debugmodel()
    for layer in config.model_spec.model.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    config.loss = CrossEntropyLoss.Config(global_vocab_size=config.model_spec.model.vocab_size)
    config.dataloader, config.tokenizer, config.activation_checkpoint = Component(Batches()), Component(None), None
    config.dump_folder = tempfile.gettempdir()
    config.parallelism.spmd_backend = "partial_dtensor"
    config.checkpoint.enable = config.validator.enable = config.debug.enable_structured_logging = False
    config.training.disable_cuda_graphs = True
    config.training.seq_len, config.training.local_batch_size = LENGTH, 1
    config.training.global_batch_size = 2 * MICROBATCHES
    config.training.mixed_precision_param = config.training.mixed_precision_reduce = "float32"
    config.comm.trace_buf_size = 0
    return config


def main() -> int:
    trainer = configured().build()
    (model,) = trainer.model_parts
    trainer.step = 1
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        trainer.train_step(trainer.batch_generator(trainer.dataloader))
    units = len(model.layers) + 2  # the embedding; norm with output
    scatters = sum(event.count for event in seen.key_averages() if event.key in SCATTERS)
    if dist.get_rank() == 0:
        print(f"{units} units of FSDP2, {MICROBATCHES} microbatches a step: {scatters} reduce_scatters")
    dist.destroy_process_group()
    return int(scatters > units)


if __name__ == "__main__":
    sys.exit(main())
