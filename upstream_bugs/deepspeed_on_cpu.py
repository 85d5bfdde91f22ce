"""Imported first by the programs here: DeepSpeed on CPU and gloo, without the collectives that it compiles at start."""

from __future__ import annotations

import importlib
import logging
import os
import warnings
from typing import Any

import torch

os.environ["DS_ACCELERATOR"] = "cpu"
warnings.simplefilter("ignore")

import deepspeed  # noqa: E402

importlib.import_module("deepspeed.comm.torch").__dict__["build_shm_op"] = lambda: None
logging.disable(logging.WARNING)


def start() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    deepspeed.init_distributed("gloo", dist_init_required=False, auto_mpi_discovery=False)


def model() -> torch.nn.Sequential:
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(8, 16, bias=False), torch.nn.Linear(16, 4, bias=False))


def samples(count: int) -> list[torch.Tensor]:
    """Every rank reads the same, so that the mean over ranks is what one device computes."""
    made = torch.Generator().manual_seed(1)
    return [torch.randn(2, 8, generator=made) for _ in range(count)]


def engine(stage: int, *, accumulation: int = 1, **zero: Any) -> Any:
    """zero: more of its options."""
    zero |= {"stage": stage, "overlap_comm": False, "stage3_param_persistence_threshold": 0}
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        "gradient_clipping": 100.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
    }
    whole = model()
    made, *_ = deepspeed.initialize(model=whole, optimizer=torch.optim.AdamW(whole.parameters(), 1e-3), config=config)
    return made


def norm_on_one_device(inputs: list[torch.Tensor]) -> float:
    """Return the norm of the sum of the losses' gradients."""
    whole = model()
    for each in inputs:
        whole(each).square().mean().backward()
    return float(torch.nn.utils.get_total_norm([p.grad for p in whole.parameters() if p.grad is not None]))


def told(text: str) -> None:
    if torch.distributed.get_rank() == 0:
        print(text, flush=True)
