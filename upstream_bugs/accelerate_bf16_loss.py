"""accelerate's bf16 under FSDP2 rounds the loss that a model returns to bfloat16 (accelerate 1.15, transformers 5.23).

Its MixedPrecisionPolicy has output_dtype bfloat16, which FSDP2 applies to whatever the root returns. transformers' models
compute their loss inside, in float32; what the Trainer shows its user has two or three digits: 6.09375 for 6.1044. Under
DDP it is returned as it is.

torchrun --nproc-per-node 2 upstream_bugs/accelerate_bf16_loss.py     exits with 1 while the bug is there
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from accelerate import Accelerator, DistributedType, FullyShardedDataParallelPlugin, PartialState


class WithLoss(torch.nn.Module):
    """Like transformers' models."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(8, 256)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        logits = self.linear(x)
        self.computed = torch.nn.functional.cross_entropy(logits.float(), labels)
        return {"loss": self.computed, "logits": logits}


def main() -> int:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, auto_wrap_policy="no_wrap")
    if not torch.cuda.is_available():  # on CPU it would ignore the plugin: accelerate_cpu_fsdp.py
        PartialState(cpu=True)
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=not torch.cuda.is_available(), fsdp_plugin=plugin, mixed_precision="bf16")
    model = WithLoss()
    prepared, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    device = accelerator.device
    returned = prepared(torch.randn(4, 8, device=device), torch.arange(4, device=device))["loss"]
    print(
        f"computed {model.computed.item():.6f} {model.computed.dtype}, returned {returned.item():.6f} {returned.dtype}"
    )
    accelerator.end_training()
    return int(returned.dtype != torch.float32)


if __name__ == "__main__":
    sys.exit(main())
