"""The driver of torchtitan's class Trainer, since 2025-03."""

from __future__ import annotations

import importlib
import shutil
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch.distributed as dist
from torch import nn

from harness.adapters.torchtitan import metrics
from harness.adapters.torchtitan.source import Source, why_not_largest
from harness.core.case.case import Case
from harness.core.trainers import Metrics


class TitanTrainer:
    """The started trainer around torchtitan's Trainer, whose metrics are recorded."""

    def __init__(self, trainer: Any, case: Case, source: Source) -> None:
        self.model_parts: list[nn.Module] = trainer.model_parts
        self.metrics: list[Metrics] = []
        self._trainer = trainer
        metrics.note_processor(
            trainer.metrics_processor,
            self.metrics,
            lambda: getattr(trainer, "pp_has_last_stage", True),
            tells_largest=not why_not_largest(case, source.era),
            separately=bool(case.features.validate_every),
        )

    def train(self, last_step: int) -> None:
        """Train to this step. torchtitan's loop ends after the last step configured, and goes on when it is entered again."""
        configuration = getattr(self._trainer, "config", None) or self._trainer.job_config
        configuration.training.steps = last_step
        self._trainer.train()

    def save(self, folder: Path) -> object:
        """Save a checkpoint into the folder, as torchtitan's loop does after a step.

        Return the future of an async save, else None. Later steps are not saved.
        """
        checkpointer = self._trainer.checkpointer
        usual = checkpointer.folder
        checkpointer.folder = str(folder)
        checkpointer.load_only = False
        checkpointer.interval = 1
        checkpointer.save(self._trainer.step)
        checkpointer.folder = usual
        checkpointer.load_only = True
        return getattr(checkpointer, "save_future", None)

    def export(self, folder: Path) -> None:
        """Save the weights under Hugging Face's names, as the loop does after the last step.

        The shards it merged are deleted.
        """
        checkpointer = self._trainer.checkpointer
        checkpointer.folder = str(folder)
        checkpointer.load_only = False
        checkpointer.last_save_in_hf = checkpointer.last_save_model_only = True
        checkpointer.save(self._trainer.step, last_step=True)
        dist.barrier()
        if dist.get_rank() == 0:
            for slices in folder.rglob("sharded"):
                shutil.rmtree(slices)

    def resume(self, folder: Path) -> None:
        """Load the latest checkpoint in the folder. Raises ValueError if there is none.

        Afterwards torchtitan's `train` finds nothing in its own folder to load.
        """
        checkpointer = self._trainer.checkpointer
        usual = checkpointer.folder
        checkpointer.folder = str(folder)
        if not checkpointer.load():
            raise ValueError(f"{folder}: no complete checkpoint there")
        checkpointer.folder = usual


def no_sleep(module: str) -> None:
    """Replace `time` in a module of torchtitan: rank 0 would sleep two seconds at the end, for the others."""
    imported = importlib.import_module(module)
    imported.time = SimpleNamespace(perf_counter=time.perf_counter, sleep=lambda _: None)  # type: ignore[attr-defined]
