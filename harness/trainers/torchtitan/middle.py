"""torchtitan from 2025-03 to 2026-02 (0.1.0 to 0.2.2): `Trainer(job_config).train()`, its parts in a TrainSpec.

What the versions between name differently is in tables here; a name that one does not know yet is not looked at by it.
"""

from __future__ import annotations

import importlib
import os
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from harness.case import Case
from harness.trainers.torchtitan import handover
from harness.trainers.torchtitan.later import Inputs, LaterTrainer
from harness.trainers.torchtitan.source import Source

FLAVORS = ("model_args", "config")  # of a TrainSpec: the models' sizes, by flavor
CONFIG_MODULES = ("torchtitan.config", "torchtitan.config_manager")  # where TORCH_DTYPE_MAP lies


def start(case: Case, source: Source, weights: Path | None, device: str) -> LaterTrainer:
    sys.path.insert(0, str(source.folder))
    os.environ.setdefault("LOCAL_RANK", "0")
    handover.meet()
    handover.give_rates(case)
    train = importlib.import_module("torchtitan.train")
    handover.no_sleep("torchtitan.train")
    hand_over(train, case, Inputs if source.era.inputs_by_name else handover.Samples)
    trainer = train.Trainer(job_config(train, case))
    handover.give_weights(trainer.model_parts, case, weights, source.era.fqn)
    return LaterTrainer(trainer, case)


def hand_over(train: ModuleType, case: Case, inputs: type[handover.Samples]) -> None:
    """In the TrainSpec that the Trainer asks for: the case's sizes, and its samples in place of data set and tokenizer."""
    specs = train.train_spec_module
    original = specs.get_train_spec

    def get_train_spec(name: str) -> Any:
        spec = original(name)
        flavors = next(getattr(spec, name) for name in FLAVORS if hasattr(spec, name))
        flavors[handover.FLAVOR] = handover.sizes(flavors[handover.FLAVOR], case)
        spec.build_tokenizer_fn = spec.tokenizer_cls = lambda *_: tokenizer(case)
        spec.build_dataloader_fn = lambda dp_world_size, dp_rank, **_: inputs(
            case, dp_world_size, dp_rank, lambda: None
        )
        return spec

    specs.get_train_spec = get_train_spec


def tokenizer(case: Case) -> SimpleNamespace:
    """All that is asked of one without text."""
    words = case.model.vocab_size
    return SimpleNamespace(n_words=words, eos_id=0, get_vocab_size=lambda: words)


def job_config(train: ModuleType, case: Case) -> Any:
    """torchtitan's own defaults, and the case's values."""
    for name in CONFIG_MODULES:
        if name in sys.modules:
            sys.modules[name].TORCH_DTYPE_MAP["float64"] = torch.float64
    return handover.configured(train.JobConfig(), options(case))


def options(case: Case) -> dict[str, Any]:
    dims, training, features = case.dims, case.training, case.features
    param = training.compute_dtype or training.dtype
    return {
        "job.dump_folder": os.path.join(tempfile.gettempdir(), "torchtitan"),
        "model.name": "llama3",
        "model.flavor": handover.FLAVOR,
        "model.norm_type": "rmsnorm",
        "optimizer.name": "AdamW",
        "optimizer.lr": training.lr,
        "training.batch_size": case.local_batch * case.microbatches,
        "training.local_batch_size": case.local_batch * case.microbatches,
        "training.global_batch_size": training.global_batch,
        "training.seq_len": training.seq_len,
        "training.steps": training.steps,
        "training.max_norm": float("inf") if training.max_norm is None else training.max_norm,
        "training.dtype": training.dtype,
        "training.mixed_precision_param": param,
        "training.mixed_precision_reduce": features.reduce_dtype or param,
        "parallelism.data_parallel_replicate_degree": dims.dp_replicate,
        "parallelism.data_parallel_shard_degree": dims.dp_shard,
        "parallelism.fsdp_reshard_after_forward": features.reshard_after_forward,
        "parallelism.tensor_parallel_degree": dims.tp,
        "parallelism.disable_loss_parallel": not features.loss_parallel,
        "parallelism.context_parallel_degree": dims.cp,
        "parallelism.pipeline_parallel_degree": dims.pp,
        "activation_checkpoint.mode": handover.CHECKPOINTING[features.activation_checkpointing],
        "activation_checkpoint.selective_ac_option": "2",
        "metrics.log_freq": 1,
        "metrics.disable_color_printing": True,
        "comm.trace_buf_size": 0,
    }
