"""Patches for DeepSpeed on CPU with gloo. None of them is applied on GPUs."""

from __future__ import annotations

import importlib
import os

SHARED_MEMORY = (
    "its collectives in shared memory: torch's (they are compiled at start, under a lock that a killed run leaves)"
)


def choose_cpu() -> None:
    """Have DeepSpeed use the CPU, by an environment variable. Call it before DeepSpeed is imported."""
    os.environ["DS_ACCELERATOR"] = "cpu"


def stub_shared_memory() -> None:
    """Replace DeepSpeed's CPU collectives in shared memory by torch's. Call it before DeepSpeed is initialized."""
    importlib.import_module("deepspeed.comm.torch").__dict__["build_shm_op"] = lambda: None
