"""What DeepSpeed needs on CPU with gloo. None of it is applied on GPUs."""

from __future__ import annotations

import importlib
import os
from typing import Any

from harness.spec.case import Case

SHARED_MEMORY = (
    "its collectives in shared memory: torch's (they are compiled at start, under a lock that a killed run leaves)"
)
FLOAT64 = "its list of dtypes: with float64; gradients travel in the recipe's dtype (it knows none above float32)"


def replaced(case: Case) -> tuple[str, ...]:
    return (SHARED_MEMORY, FLOAT64) if case.training.dtype == "float64" else (SHARED_MEMORY,)


def choose() -> None:
    """Before it is imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def lend(dtype: Any) -> None:
    import torch
    from deepspeed.accelerator import get_accelerator
    from deepspeed.runtime.engine import DeepSpeedEngine

    importlib.import_module("deepspeed.comm.torch").__dict__["build_shm_op"] = lambda: None
    if dtype == torch.float64:
        known = get_accelerator().supported_dtypes()
        type(get_accelerator()).supported_dtypes = lambda self: [*known, dtype]
        DeepSpeedEngine.communication_data_type = property(lambda self: dtype)
