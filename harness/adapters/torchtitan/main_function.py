"""The trainer of torchtitan from 2024-09-10 to 2025-03: `main(job_config)` in a script, at first beside the package."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

from torch import nn

from harness.adapters.support.training_function import TrainingFunction
from harness.adapters.torchtitan import job_config, metrics
from harness.adapters.torchtitan.data_loader import Samples
from harness.adapters.torchtitan.eras import MAIN_FUNCTION
from harness.adapters.torchtitan.source import Source
from harness.core.case.case import Case
from harness.core.trainers import Metrics
from harness.core.trainers.support.weights import load_weights


class MainTrainer:
    """The started trainer around `main`, stopped where it asks its data loader for an iterator.

    It trains to the last step of the case only. It cannot save or resume: both raise NotImplementedError.
    """

    def __init__(
        self, train: ModuleType, case: Case, weights: Path | None, own: Mapping[str, Any] | None = None
    ) -> None:
        self.model_parts: list[nn.Module] = []
        self.metrics: list[Metrics] = []
        self._train = train
        self._case = case
        self._weights = weights
        self._job = job_config.configure_job(train.JobConfig(), case, own)
        self._main = TrainingFunction(self._run)
        self._replace_names_of_script()
        self._main.set_up()

    def train(self, last_step: int) -> None:
        assert last_step == self._case.training.steps
        self._main.train()

    def save(self, folder: Path) -> object:
        raise NotImplementedError

    def resume(self, folder: Path) -> None:
        raise NotImplementedError

    def _run(self, _: TrainingFunction) -> None:
        """Run torchtitan's `main`, in the thread of the training function."""
        self._train.main(self._job)

    def _has_output(self) -> bool:
        """Return whether this rank has the output layer. A pipeline's other ranks report a loss of -1."""
        return any(getattr(part, "output", None) is not None for part in self.model_parts)

    def _replace_names_of_script(self) -> None:
        """Replace names in the script's module: data loader, tokenizer, builder of optimizers, loggers, model sizes.

        Names that this version does not have are left out. Weights are loaded when optimizers are built, and its sleep
        is removed.
        """
        train = self._train
        case = self._case

        def loader(dp_world_size: int, dp_rank: int, **_: Any) -> Samples:
            return Samples(case, dp_world_size, dp_rank, at_start=self._main.wait)

        def watched(build: Callable[..., Any]) -> Callable[..., Any]:
            """Return a builder of optimizers, changed to keep the model and load its weights first, before any code
            reads them.
            """

            def build_optimizers(model_parts: list[nn.Module], *args: Any) -> Any:
                self.model_parts = list(model_parts)
                load_weights(self.model_parts, case, self._weights, MAIN_FUNCTION.fqn)
                return build(model_parts, *args)

            return build_optimizers

        def specified(spec: Any) -> Any:
            spec.build_optimizers_fn = watched(spec.build_optimizers_fn)
            return job_config.specify_model(spec, case, loader)

        replaced: dict[str, Callable[[Any], Any]] = {
            "build_hf_data_loader": lambda _: lambda *given: loader(*given[5:7]),
            "build_tokenizer": lambda _: lambda *_: job_config.tokenizer(case),
            "build_optimizers": watched,
            "build_metric_logger": lambda old: lambda *_: metrics.note_logger(old(*_), self.metrics, self._has_output),
            "build_metrics_processor": lambda old: (
                lambda *_: metrics.note_processor(old(*_), self.metrics, self._has_output)
            ),
            "get_train_spec": lambda old: lambda name: specified(old(name)),
            "time": lambda _: SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None),
        }
        for name, replacement in replaced.items():
            if hasattr(train, name):
                setattr(train, name, replacement(getattr(train, name)))
        if hasattr(train, "models_config"):
            flavors = train.models_config["llama3"]
            flavors[job_config.FLAVOR] = job_config.sizes(flavors[job_config.FLAVOR], case)


def start(case: Case, source: Source, weights: Path | None, device: str) -> MainTrainer:
    """Return a trainer around `main` of the source's script, which must be there, stopped before its first batch."""
    assert source.script is not None
    return MainTrainer(load_script(source.script), case, weights, source.options)


def load_script(path: Path) -> ModuleType:
    """Import a script as the module "torchtitan_train" and return it.

    If the package is read as for CPU (ReadAsCpu), so is the script.
    """
    from harness.adapters.torchtitan.cpu import CpuLoader, ReadAsCpu

    on_cpu = any(isinstance(finder, ReadAsCpu) for finder in sys.meta_path)
    loader = CpuLoader("torchtitan_train", str(path)) if on_cpu else None
    spec = importlib.util.spec_from_file_location("torchtitan_train", path, loader=loader)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
