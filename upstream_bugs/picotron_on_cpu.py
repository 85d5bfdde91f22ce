"""picotron's own train.py as it is, where there is no accelerator, flash-attn, wandb and network.

Imports that a CPU run does not call (flash_attn, wandb) are stubbed, and so are two calls of CUDA that it makes on CPU, too.
Its data are random tokens, its weights are random numbers instead of a download, and the model's sizes are set here. The rest
is its own.

PYTHONPATH=CHECKOUT torchrun --nproc-per-node 2 upstream_bugs/picotron_on_cpu.py dp=2     trains for three steps
"""

from __future__ import annotations

import json
import os
import runpy
import sys
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import transformers

STEPS, LENGTH, SAMPLES, WORDS = 3, 32, 4, 64
SIZES = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "vocab_size": WORDS,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
}
FLASH = ("flash_attn_interface", "layers", "layers.rotary", "ops", "ops.triton", "ops.triton.layer_norm")


class Batches:
    """In place of its MicroBatchDataLoader: data ranks read other samples, cp ranks their part of the sequence."""

    def __init__(self, micro_batch_size: int, seq_length: int, grad_acc_steps: int, **_: Any) -> None:
        grid = sys.modules["picotron.process_group_manager"].process_group_manager
        self.micro_batch_size, self.grad_acc_steps = micro_batch_size, grad_acc_steps
        self.global_batch_size = micro_batch_size * grad_acc_steps * grid.dp_world_size
        self.seq_length_per_gpu = seq_length // grid.cp_world_size
        self.start = grid.cp_rank * self.seq_length_per_gpu
        self.made = torch.Generator().manual_seed(7 + grid.dp_rank)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        tokens = torch.randint(WORDS, (self.micro_batch_size, LENGTH + 1), generator=self.made)
        mine = tokens[:, self.start : self.start + self.seq_length_per_gpu + 1]
        return {
            "input_ids": mine[:, :-1].contiguous(),
            "target_ids": mine[:, 1:].contiguous(),
            "position_ids": torch.arange(self.seq_length_per_gpu).expand(self.micro_batch_size, -1),
            "hidden_states": None,
        }


def own_weights(model: torch.nn.Module, *_: Any, **__: Any) -> torch.nn.Module:
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for name, each in model.named_parameters():
        if "norm" in name:
            torch.nn.init.ones_(each)
        else:
            torch.nn.init.normal_(each, std=0.02)
    return model


def configuration(degrees: dict[str, int]) -> dict[str, Any]:
    sizes = {f"{axis}_size": degrees.get(axis, 1) for axis in ("tp", "cp", "pp", "dp")}
    switches = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "FLASH_ATTEN": "0", "HF_TOKEN": "none"}
    training = {"seed": 1, "learning_rate": 1e-3, "total_train_steps": STEPS, "seq_length": LENGTH, "max_tokens": None}
    return {
        "distributed": {**sizes, "pp_engine": "1f1b", "use_cpu": True},
        "model": {"name": "small", "use_fused_adam": False},
        "dataset": {"name": "random", "num_workers": 0, "num_proc": 1},
        "training": {**training, "micro_batch_size": SAMPLES, "gradient_accumulation_steps": 1},
        "environment": switches,
        "checkpoint": {"save_dir": "unused", "save_frequency": STEPS + 1, "load_path": ""},
        "logging": {"use_wandb": False, "run_name": "small"},
    }


def lend() -> None:
    for name in ("wandb", "flash_attn", *(f"flash_attn.{each}" for each in FLASH)):
        sys.modules[name] = MagicMock()
    data: Any = types.ModuleType("picotron.data")
    data.MicroBatchDataLoader = Batches
    sys.modules["picotron.data"] = data
    os.environ["FLASH_ATTEN"] = "0"
    torch.cuda.synchronize = lambda *_: None
    transformers.AutoConfig.from_pretrained = lambda *_: types.SimpleNamespace(**SIZES)
    import picotron.checkpoint  # after what it imports is stubbed
    import picotron.utils

    picotron.checkpoint.init_model_with_materialized_weights = own_weights
    picotron.utils.download_model = lambda *_: None
    picotron.utils.get_num_params = lambda model: sum(each.numel() for each in model.parameters())


def train(**degrees: int) -> None:
    """Its train.py, from the checkout that PYTHONPATH names."""
    torch.set_num_threads(1)
    lend()
    script = Path(sys.modules["picotron.utils"].__dict__["__file__"]).parent.parent / "train.py"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(configuration(degrees), file)
        file.flush()
        sys.argv = [str(script), "--config", file.name]
        runpy.run_path(str(script), run_name="__main__")


if __name__ == "__main__":
    train(**{axis: int(degree) for axis, degree in (each.split("=") for each in sys.argv[1:])})
