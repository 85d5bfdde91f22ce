"""Megatron-core 0.16.1: with perform_initialization=False the gradient norm, and so clipping, counts tp rank 0's parts alone.

The initialisers, which are not called then, are what marks a weight as tensor parallel. The norm takes a weight without that
mark for a copy, and counts it on the first tp rank only. Megatron-Bridge #992 works around it, Megatron-LM #4084 repairs it.

torchrun --nproc-per-node 2 upstream_bugs/megatron_perform_initialization.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys

import megatron_on_cpu  # noqa: F401
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.tensor_parallel import ColumnParallelLinear
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule


class Model(MegatronModule):
    def __init__(self, config: TransformerConfig) -> None:
        super().__init__(config)
        self.linear = ColumnParallelLinear(8, 32, config=config, init_method=torch.nn.init.ones_, bias=False)


def norm_of(perform: bool) -> float:
    """Return the norm of one weight's gradient, of which rank 0 has 128 ones and rank 1 has 128 twos."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=8,
        num_attention_heads=2,
        tensor_model_parallel_size=2,
        use_cpu_initialization=True,
        perform_initialization=perform,
    )
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), Model(config))
    torch.nn.init.ones_(model.module.linear.weight)
    optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="adam", lr=1e-3, clip_grad=1.0), [model])
    model.module.linear.weight.main_grad.fill_(1.0 + dist.get_rank())
    return float(optimizer.step()[1])


def main() -> int:
    dist.init_process_group("gloo")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    true = (128 * 1.0 + 128 * 4.0) ** 0.5
    norms = {perform: norm_of(perform) for perform in (True, False)}
    if dist.get_rank() == 0:
        print(
            "".join(f"perform_initialization {key}: norm {value:.4f} of {true:.4f}\n" for key, value in norms.items())
        )
    dist.destroy_process_group()
    return int(any(abs(norm - true) > 1e-3 for norm in norms.values()))


if __name__ == "__main__":
    sys.exit(main())
