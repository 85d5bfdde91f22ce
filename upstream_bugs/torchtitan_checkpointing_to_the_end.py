"""torchtitan 0.3.0 recomputes whole blocks under full activation checkpointing, their last product included.

FullAC passes early_stop=False to torch's checkpoint. No gradient needs the result of a block's last product (w2), only its
inputs, so torch by default stops before it. Here one product in seven is done for nothing, and with tensor parallel the sum of
its parts over the ranks as well. The numbers are right.

python upstream_bugs/torchtitan_checkpointing_to_the_end.py     exits with 1 while it is so
"""

from __future__ import annotations

import sys
from typing import Any

import titan_on_cpu  # noqa: F401
import torch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils._python_dispatch import TorchDispatchMode
from torchtitan.distributed.activation_checkpoint import FullAC
from torchtitan.models.common.attention import ScaledDotProductAttention
from torchtitan.models.llama3 import model_registry


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def in_backward(apply: Any) -> int:
    """Matmuls of a backward pass of the debug model."""
    config = model_registry("debugmodel").model
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()
    model = config.build()
    with torch.no_grad():
        model.init_weights(buffer_device=None)
    apply(model)
    loss = model(torch.randint(0, 2000, (1, 16))).sum()
    with Products() as products:
        loss.backward()
    return products.count


def stopping_early(model: Any) -> None:
    for name, block in model.layers.named_children():
        model.layers.register_module(name, checkpoint_wrapper(block))


def main() -> int:
    plain = in_backward(lambda model: None)
    early = in_backward(stopping_early) - plain
    full = in_backward(lambda model: FullAC.Config().build(dump_folder="").apply(model)) - plain
    layers = len(model_registry("debugmodel").model.layers)
    print(
        f"products done again, {layers} blocks: torch's checkpoint {early}, torchtitan's {full}; backward itself {plain}"
    )
    return int(full > early)


if __name__ == "__main__":
    sys.exit(main())
