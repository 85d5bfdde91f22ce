"""The trainer of torchtitan from 2025-03 to 2026-02 (0.1.0 to 0.2.2): `Trainer(job_config).train()`, its parts in a
TrainSpec.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from harness.adapters.torchtitan import job_config
from harness.adapters.torchtitan.data_loader import Inputs, LoaderBuilder, Samples
from harness.adapters.torchtitan.source import Source
from harness.adapters.torchtitan.trainer import TitanTrainer, no_sleep
from harness.core.case.case import Case
from harness.core.trainers.support.weights import load_weights


def start(case: Case, source: Source, weights: Path | None, device: str) -> TitanTrainer:
    """Return torchtitan's trainer, built for the case, with the weights loaded and the case's samples in the place of its own.

    weights: None for the seed's.
    """
    train = importlib.import_module("torchtitan.train")
    no_sleep("torchtitan.train")
    patch_train_specs(train.train_spec_module, case, Inputs if source.era.inputs_by_name else Samples)
    replace_validation_loader(case, source)
    trainer = train.Trainer(job_config.configure_job(train.JobConfig(), case, source.options))
    train.trainer = trainer  # type: ignore[attr-defined]  # as its entry point has it: until 2025-04-01 `train` reads it
    load_weights(trainer.model_parts, case, weights, source.era.fqn)
    return TitanTrainer(trainer, case, source)


def replace_validation_loader(case: Case, source: Source) -> None:
    """Patch torchtitan's validation so that its n-th run has the samples of training step n + 1.

    Its builders of data loaders are replaced in torchtitan.components.validate, as far as this version has them. Nothing
    happens unless the option `validation.enable` is set.
    """
    if not source.options.get("validation.enable"):
        return
    module = importlib.import_module("torchtitan.components.validate")
    ahead = LoaderBuilder(case, Inputs if source.era.inputs_by_name else Samples)
    for name in ("build_hf_validation_dataloader", "build_text_validation_dataloader"):
        if hasattr(module, name):
            setattr(module, name, ahead.build)


def patch_train_specs(specs: Any, case: Case, inputs: type[Samples]) -> None:
    """Patch `get_train_spec` so that whatever TrainSpec is looked up has the case's sizes and samples. inputs: their form."""
    original = specs.get_train_spec

    def loader(dp_world_size: int, dp_rank: int, **_: Any) -> Samples:
        return inputs(case, dp_world_size, dp_rank, lambda: None)

    specs.get_train_spec = lambda name: job_config.specify_model(original(name), case, loader)
