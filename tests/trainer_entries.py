"""What tests/core/trainers/test_trainer.py runs on every rank."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from harness.core.case.case import Case
from harness.core.case.loading import from_json
from harness.core.trainers import load_adapter
from harness.core.trainers.llama3 import checkpoint, clip, data
from harness.core.trainers.llama3.trainer import Trainer
from harness.reference.data import IGNORED, sample_order


def train(options: dict[str, Any]) -> None:
    """Train `case`, if asked from a checkpoint `resume` or saving in `checkpoints` after step 2; write rank_N.pt.

    `silent`: places in the epoch's order of samples that have no valid label.
    """
    adapter, case = load_adapter("llama3"), from_json(options["case"])
    silence(case, options.get("silent", []))
    gradients = record_gradients()
    trainer = adapter.start(case, None, "cpu")
    assert isinstance(trainer, Trainer)
    fqns = {parameter: adapter.fqn(name) for name, parameter in trainer.model_parts[0].named_parameters()}
    start = {fqn: local(parameter).clone() for parameter, fqn in fqns.items()}
    if "resume" in options:
        trainer.resume(Path(options["resume"]))
    resumed_at = trainer.step, trainer.microbatches.samples
    if "checkpoints" in options:
        trainer.train(2, checkpoints=Path(options["checkpoints"]), checkpoint_every=2)
    trainer.train()
    told = account(trainer) | {"start": start, "resumed_at": resumed_at}
    told["gradients"] = [{fqns[parameter]: value for parameter, value in step.items()} for step in gradients]
    torch.save(told, Path(options["out"]) / f"rank_{os.environ['RANK']}.pt")
    adapter.stop()


def account(trainer: Trainer) -> dict[str, Any]:
    """Everything that training on depends on, tensors whole."""
    state = checkpoint.state_of(trainer.parts(), trainer.counters())
    tensors = state["model"] | {name: value for name, value in state["optimizer"].items() if torch.is_tensor(value)}
    return {
        "metrics": [replace(one, numbers={}) for one in trainer.metrics],  # others are the rank's own, or times
        "tensors": {name: whole(value) for name, value in tensors.items()},
        "options": {name: value for name, value in state["optimizer"].items() if not torch.is_tensor(value)},
        "scheduler": trainer.schedulers[0].state_dict(),
        "position": (state["step"], state["samples"]),
    }


def record_gradients() -> list[dict[Any, Tensor]]:
    """Whole gradients before clipping, one entry a step, filled as the trainer goes."""
    steps: list[dict[Any, Tensor]] = []
    original = clip.clip_gradients

    def seen(parameters: list[Any], *rest: Any) -> float:
        steps.append({parameter: whole(parameter.grad) for parameter in parameters})
        return original(parameters, *rest)

    clip.clip_gradients = seen
    return steps


class SilencedDataset:
    """A dataset with no valid label in the samples `silent`."""

    def __init__(self, dataset: Any, silent: set[int]) -> None:
        self.dataset, self.silent = dataset, silent

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        tokens, labels = self.dataset[index]
        return tokens, torch.full_like(labels, IGNORED) if index in self.silent else labels


def silence(case: Case, places: list[int]) -> None:
    build = data.build_dataset

    def silenced(*arguments: Any) -> Any:
        dataset = build(*arguments)
        order = sample_order(case.training, len(dataset), 0)
        return SilencedDataset(dataset, {order[place] for place in places})

    data.build_dataset = silenced  # type: ignore[assignment]


def local(value: Tensor) -> Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()


def whole(value: Tensor) -> Tensor:
    """A copy. full_tensor() of a replicated DTensor is a view of it."""
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
