"""picotron trains in float32 with rotary tables that were rounded to bfloat16.

Their type is read from the environment variable DTYPE, which train.py never sets; without it, the type is bfloat16. The run's
type is chosen elsewhere: float32 on CPU and on GPUs without bfloat16. Expected: tables of the run's type.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 1 upstream_bugs/picotron_rotary_tables.py     exits with 1 if it is so
"""

from __future__ import annotations

import sys
from typing import Any

import picotron_on_cpu as on_cpu
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

seen: set[tuple[torch.dtype, torch.dtype]] = set()
error: list[float] = []


def look(module: torch.nn.Module, _: Any) -> None:
    if type(module).__name__ == "DecoderLayer":
        seen.add((next(module.parameters()).dtype, module.cos.dtype))
        half = module.cos.shape[1] // 2
        powers = torch.arange(half, dtype=torch.float32) / half
        angles = torch.arange(len(module.cos))[:, None] / on_cpu.SIZES["rope_theta"] ** powers
        error.append(float((module.cos[:, :half].float() - angles.cos()).abs().max()))


if __name__ == "__main__":
    register_module_forward_pre_hook(look)
    on_cpu.train()
    for weights, tables in seen:
        print(f"weights are {weights}, rotary tables {tables}, and wrong by up to {max(error):.1e}", flush=True)
    sys.exit(int(any(weights != tables for weights, tables in seen)))
