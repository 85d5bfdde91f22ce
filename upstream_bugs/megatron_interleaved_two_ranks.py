"""Megatron-core 0.16.1: the interleaved schedule on 2 pipeline ranks, as it comes, exchanges tensors between the wrong stages.

Both neighbours of a rank are the same rank then. By default (`batch_p2p_comm`) a batch holds two sends to it, which are matched
by their order. So what is meant for the next stage is taken for what is meant for the previous one. megatron.training refuses
two ranks without `overlap_p2p_comm`; megatron.core, which others build on, says nothing. Megatron-LM #750 explains why.

torchrun --nproc-per-node 2 upstream_bugs/megatron_interleaved_two_ranks.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import megatron_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule

RANKS, CHUNKS, MICROBATCHES = 2, 2, 4


class Stage(MegatronModule):
    """Adds 10 ** its number to what it is given."""

    def __init__(self, config: TransformerConfig, chunk: int) -> None:
        super().__init__(config)
        self.model_type, self.vp_stage, self.number = None, chunk, dist.get_rank() + RANKS * chunk
        self.weight = torch.nn.Parameter(torch.ones(()))

    def set_input_tensor(self, given: Any) -> None:
        self.given = given[0] if isinstance(given, list) else given

    def forward(self, first: torch.Tensor) -> torch.Tensor:
        return (first if self.number == 0 else self.given) + self.weight * 10.0**self.number


def outputs(**options: bool) -> list[float]:
    """Return, for each microbatch, numbered from 0, what the last stage makes of its number."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=8,
        num_attention_heads=2,
        pipeline_model_parallel_size=RANKS,
        virtual_pipeline_model_parallel_size=CHUNKS,
        pipeline_dtype=torch.float32,
        **options,
    )
    found: list[float] = []

    def loss(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, Any]]:
        found.append(output.mean().item())
        return output.mean(), {}

    def step(numbers: Iterator[int], stage: Any) -> Any:
        return stage(torch.full((4, 1, 8), float(next(numbers)))), loss

    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=[iter(range(MICROBATCHES)) for _ in range(CHUNKS)],
        model=[Stage(config, chunk) for chunk in range(CHUNKS)],
        num_microbatches=MICROBATCHES,
        seq_length=4,
        micro_batch_size=1,
        forward_only=False,
    )
    return found


def main() -> int:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=RANKS, virtual_pipeline_model_parallel_size=CHUNKS
    )
    right, wrong = [1111.0 + number for number in range(MICROBATCHES)], torch.zeros(())
    for options in ({}, {"batch_p2p_comm": False}):
        found = outputs(**options)
        if dist.get_rank() == RANKS - 1:
            print(f"{options or 'as it comes'}: outputs {found}, right {right}")
            wrong += found != right
    dist.all_reduce(wrong)
    dist.destroy_process_group()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
