"""torchtitan from 2024-09-10 to 2025-03: `main(job_config)` in a script, at first beside the package, a namespace package."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from harness.spec.case import Case
from harness.trainers import Metrics
from harness.trainers.torchtitan import handover, job
from harness.trainers.torchtitan.paused import Paused
from harness.trainers.torchtitan.source import EARLY, Source


class EarlyTrainer:
    """harness.trainers.StartedTrainer around `main`, which is held where it asks its data loader for an iterator."""

    def __init__(self, train: ModuleType, case: Case, weights: Path | None) -> None:
        self.model_parts: list[nn.Module] = []
        self.metrics: list[Metrics] = []
        self._train, self._case, self._weights = train, case, weights
        self._job = job.configured(train.JobConfig(), case)
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
        """At the names that `main` looks up in its own module, those that it has."""
        train, case = self._train, self._case

        def loader(dp_world_size: int, dp_rank: int, **_: Any) -> handover.Samples:
            return handover.Samples(case, dp_world_size, dp_rank, at_start=self._paused.hold)

        def watched(build: Callable[..., Any]) -> Callable[..., Any]:
            """A builder of optimizers is told the model when it is whole, and before anybody reads its weights."""

            def build_optimizers(model_parts: list[nn.Module], *args: Any) -> Any:
                self.model_parts = list(model_parts)
                handover.give_weights(self.model_parts, case, self._weights, EARLY.fqn)
                return build(model_parts, *args)

            return build_optimizers

        def specified(spec: Any) -> Any:
            spec.build_optimizers_fn = watched(spec.build_optimizers_fn)
            return job.specified(spec, case, loader)

        replaced: dict[str, Callable[[Any], Any]] = {
            "build_hf_data_loader": lambda _: lambda *given: loader(*given[5:7]),
            "build_tokenizer": lambda _: lambda *_: job.tokenizer(case),
            "build_optimizers": watched,
            "build_metric_logger": lambda old: lambda *_: handover.note_logger(old(*_), case, self.metrics),
            "build_metrics_processor": lambda old: lambda *_: handover.note_processor(old(*_), case, self.metrics),
            "get_train_spec": lambda old: lambda name: specified(old(name)),
            "time": lambda _: SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None),
        }
        for name, replacement in replaced.items():
            if hasattr(train, name):
                setattr(train, name, replacement(getattr(train, name)))
        if hasattr(train, "models_config"):
            flavors = train.models_config["llama3"]
            flavors[job.FLAVOR] = job.sizes(flavors[job.FLAVOR], case)


def start(case: Case, source: Source, weights: Path | None, device: str) -> EarlyTrainer:
    sys.path.insert(0, str(source.folder))
    os.environ.setdefault("LOCAL_RANK", "0")
    handover.meet()
    handover.give_rates(case)
    assert source.script is not None
    train = load_script(source.script)
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
