"""torchtitan from 2024-09-10 to 2024-12: `main(job_config)` in train.py beside the package, which is a namespace package."""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import nn

from harness.case import Case
from harness.trainers import Metrics
from harness.trainers.torchtitan import handover
from harness.trainers.torchtitan.paused import Paused
from harness.trainers.torchtitan.source import EARLY, Source


class EarlyTrainer:
    """harness.trainers.StartedTrainer around `main`, which is held where it asks its data loader for an iterator."""

    def __init__(self, train: ModuleType, case: Case, weights: Path | None) -> None:
        self.model_parts: list[nn.Module] = []
        self.metrics: list[Metrics] = []
        self._train, self._case, self._weights = train, case, weights
        self._job = job_config(train, case)
        self._paused = Paused(self._run)
        self._hand_over()
        self._paused.to_hold()

    def train(self, last_step: int) -> None:
        assert last_step == self._case.training.steps
        self._paused.to_end()

    def save(self, folder: Path) -> object:
        raise NotImplementedError

    def resume(self, folder: Path) -> None:
        raise NotImplementedError

    def _run(self, paused: Paused) -> None:
        self._train.main(self._job)

    def _hand_over(self) -> None:
        """At the names that `main` looks up in its own module."""
        train, case = self._train, self._case
        build_optimizers, build_logger = train.build_optimizers, train.build_metric_logger

        def loader(dataset: Any, path: Any, tokenizer: Any, batch: int, length: int, degree: int, rank: int, *_: Any):
            return handover.Samples(case, degree, rank, at_start=self._paused.hold)

        def optimizers(model_parts: list[nn.Module], *args: Any) -> Any:
            self.model_parts = list(model_parts)
            handover.give_weights(self.model_parts, case, self._weights, EARLY.fqn)
            return build_optimizers(model_parts, *args)

        def logger(*args: Any, **kwargs: Any) -> Any:
            return handover.note_metrics(build_logger(*args, **kwargs), case, self.metrics)

        train.build_hf_data_loader = loader  # type: ignore[attr-defined]
        train.build_tokenizer = lambda *_: SimpleNamespace(n_words=case.model.vocab_size)  # type: ignore[attr-defined]
        train.build_optimizers = optimizers  # type: ignore[attr-defined]
        train.build_metric_logger = logger  # type: ignore[attr-defined]
        train.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)  # type: ignore[attr-defined]


def start(case: Case, source: Source, weights: Path | None, device: str) -> EarlyTrainer:
    sys.path.insert(0, str(source.folder))
    os.environ.setdefault("LOCAL_RANK", "0")
    handover.meet()
    handover.give_rates(case)
    train = load_script(source.folder / "train.py")
    set_model(train, case)
    return EarlyTrainer(train, case, weights)


def load_script(path: Path) -> ModuleType:
    """Through the same loader as the package, where there is one."""
    from harness.trainers.torchtitan.cpu import CpuLoader, ReadAsCpu

    on_cpu = any(isinstance(finder, ReadAsCpu) for finder in sys.meta_path)
    loader = CpuLoader("torchtitan_train", str(path)) if on_cpu else None
    spec = importlib.util.spec_from_file_location("torchtitan_train", path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def set_model(train: ModuleType, case: Case) -> None:
    """The case's sizes in torchtitan's table of flavors."""
    flavors = train.models_config["llama3"]
    flavors[handover.FLAVOR] = handover.sizes(flavors[handover.FLAVOR], case)


def job_config(train: ModuleType, case: Case) -> Any:
    """torchtitan's own defaults, and the case's values."""
    config_module = sys.modules["torchtitan.config_manager"]
    config_module.TORCH_DTYPE_MAP["float64"] = torch.float64
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
        "optimizer.fused": True,
        "training.batch_size": case.local_batch,
        "training.seq_len": training.seq_len,
        "training.steps": training.steps,
        "training.warmup_steps": training.warmup_steps,
        "training.max_norm": float("inf") if training.max_norm is None else training.max_norm,
        "training.data_parallel_degree": dims.dp,
        "training.data_parallel_replicate_degree": dims.dp_replicate,
        "training.data_parallel_shard_degree": dims.dp_shard,
        "training.tensor_parallel_degree": dims.tp,
        "training.enable_loss_parallel": features.loss_parallel,
        "training.mixed_precision_param": param,
        "training.mixed_precision_reduce": features.reduce_dtype or param,
        "training.compile": False,
        "experimental.pipeline_parallel_degree": dims.pp,
        "experimental.context_parallel_degree": dims.cp,
        "activation_checkpoint.mode": handover.CHECKPOINTING[features.activation_checkpointing],
        "activation_checkpoint.selective_ac_option": "2",
        "metrics.log_freq": 1,
        "metrics.enable_tensorboard": False,
        "metrics.enable_color_printing": False,
        "checkpoint.enable_checkpoint": False,
        "comm.trace_buf_size": 0,
    }
