"""torchtitan from 2025-03 to 2026-02 (0.1.0 to 0.2.2): `Trainer(job_config).train()`, its parts in a TrainSpec."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

from harness.spec.case import Case
from harness.trainers.llama3.context import teach_cpu_attention
from harness.trainers.torchtitan import handover, job
from harness.trainers.torchtitan.later import Inputs, LaterTrainer
from harness.trainers.torchtitan.source import Source


def start(case: Case, source: Source, weights: Path | None, device: str) -> LaterTrainer:
    sys.path.insert(0, str(source.folder))
    os.environ.setdefault("LOCAL_RANK", "0")
    handover.meet()
    handover.give_rates(case)
    train = importlib.import_module("torchtitan.train")
    handover.no_sleep("torchtitan.train")
    if case.dims.cp > 1 and device == "cpu":
        teach_cpu_attention(exact=(case.training.compute_dtype or case.training.dtype) == "float64")
    hand_over(train.train_spec_module, case, Inputs if source.era.inputs_by_name else handover.Samples)
    trainer = train.Trainer(job.configured(train.JobConfig(), case))
    train.trainer = trainer  # type: ignore[attr-defined]  # as its entry point has it: until 2025-04-01 `train` requests it
    handover.give_weights(trainer.model_parts, case, weights, source.era.fqn)
    return LaterTrainer(trainer, case)


def hand_over(specs: Any, case: Case, inputs: type[handover.Samples]) -> None:
    original = specs.get_train_spec

    def loader(dp_world_size: int, dp_rank: int, **_: Any) -> handover.Samples:
        return inputs(case, dp_world_size, dp_rank, lambda: None)

    specs.get_train_spec = lambda name: job.specified(original(name), case, loader)
