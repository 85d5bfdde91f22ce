"""torchtitan exports a model under Hugging Face's names without its adapters, neither merged nor beside, and says nothing.

Llama3StateDictAdapter.to_hf goes over the names of a checkpoint and leaves out a name of a block that it does not know. Names
with `lora_a` and `lora_b` are unknown to it. `checkpoint.last_save_in_hf` saves what it returns, which are the only weights
that the last step leaves then. They are the frozen ones that training began with.

python upstream_bugs/torchtitan_lora_export.py     one process; exits with 1 while it is so
"""

from __future__ import annotations

import sys

import titan_on_cpu  # noqa: F401
import torch
from torchtitan.components.lora import LoRAConverter
from torchtitan.models.llama3 import model_registry


def main() -> int:
    converter = LoRAConverter.Config(rank=8, alpha=16.0, target_modules=["wo"])
    spec = model_registry("debugmodel", converters=[converter])
    model = spec.model.build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "lora" in name else 0.0)  # as if training had moved nothing but the adapters
    held = model.state_dict()
    exported = spec.state_dict_adapter(spec.model, None).to_hf(held)
    adapters = [name for name in held if "lora" in name]
    carried = [name for name, value in exported.items() if bool(value.any())]
    print(f"{len(held)} tensors, {len(adapters)} of them of adapters")
    print(f"{len(exported)} tensors are exported, {len(carried)} of them not zero")
    return int(not carried)


if __name__ == "__main__":
    sys.exit(main())
