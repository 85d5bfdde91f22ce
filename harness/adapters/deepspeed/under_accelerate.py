"""Patches for DeepSpeed's engine where accelerate makes it, for a trainer that has its ZeRO from there."""

from __future__ import annotations

import os
from typing import Any

from harness.adapters.deepspeed import cpu

LENT = "accelerate's choice of a backend: gloo on CPU (it knows none for DeepSpeed there, and would count one rank)"


def choose(device: str) -> None:
    """Have DeepSpeed and accelerate use the CPU; nothing on other devices. Call it before accelerate is imported."""
    if device == "cpu":
        cpu.choose_cpu()
        os.environ["ACCELERATE_TORCH_DEVICE"] = "cpu"


def patch_accelerate_backend(device: str) -> None:
    """Patch Accelerate to prepare gloo for several processes on CPU; nothing on other devices.

    Call it before Accelerate's state is made. With `use_cpu` it would silently run DDP.
    """
    if device != "cpu":
        return
    import deepspeed  # noqa: F401
    from accelerate import DistributedType, PartialState

    cpu.stub_shared_memory()

    def backend(*_: Any) -> tuple[str, DistributedType]:
        return "gloo", DistributedType.MULTI_GPU

    PartialState._prepare_backend = backend
