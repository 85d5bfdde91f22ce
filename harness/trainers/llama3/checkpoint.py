"""Checkpoints in torch's distributed format: model, optimizer, finished steps and data position.

Every rank writes what it holds, under the reference's names, so another layout can read it. `step_000004` is complete
if and only if it contains .metadata, which is written last. The schedule is a function of the finished steps.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.lr_scheduler import LRScheduler

if TYPE_CHECKING:
    from harness.trainers.llama3.trainer import Trainer

# Flat keys (state.<fqn>.exp_avg), so that the parts of a pipeline can be merged and split anew.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


def save(trainer: Trainer, folder: Path) -> Path:
    """Write folder/step_NNNNNN. Called on every rank."""
    target = folder / f"step_{trainer.step:06d}"
    dcp.save(state_of(trainer), checkpoint_id=target)
    return target


def resume(trainer: Trainer, checkpoint: Path) -> None:
    """Continue where this checkpoint was written. Called on every rank, before the first step. Raises ValueError if it
    cannot be read.

    Trap: get_optimizer_state_dict makes a fresh optimizer's state by calling its step() with gradients of zero.
    """
    state = state_of(trainer)
    read(state, checkpoint)
    for part, optimizer, scheduler in trainer.parts():
        own = {fqn: state["model"][fqn] for fqn in get_model_state_dict(part)}
        set_model_state_dict(part, own, options=StateDictOptions(strict=True))
        set_optimizer_state_dict(part, optimizer, state["optimizer"], options=OPTIONS)
        continue_schedule(scheduler, state["step"])
    trainer.step = state["step"]
    trainer.microbatches.seek(state["samples"])


def read(state: dict[str, Any], checkpoint: Path) -> None:
    """In place. torch gathers the exceptions of all ranks into one with everybody's tracebacks: told is the first."""
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:
        rank, (cause, *_) = next(iter(error.failures.items()))
        told = f"{type(cause).__name__} on rank {rank}: {cause}"
        raise ValueError(
            f"{checkpoint}: damaged or of another model: {told}; delete it to go on from an older one"
        ) from error


def continue_schedule(scheduler: LRScheduler, finished: int) -> None:
    """As after this many finished steps.

    Trap: a scheduler's own state dict lists a rate for every parameter group, and another layout may have more groups.
    """
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    told = {"last_epoch": finished, "_step_count": finished + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | told)


def latest(folder: Path) -> Path:
    """The complete checkpoint of the highest step. Raises ValueError if there is none."""
    complete = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    complete = [path for path in complete if (path / ".metadata").exists()]
    if not complete:
        raise ValueError(f"{folder}: no complete checkpoint (step_*/.metadata) to resume from")
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")))


def state_of(trainer: Trainer) -> dict[str, Any]:
    """Tensors are the trainer's own, not copies: dcp.load writes into them."""
    model: dict[str, Any] = {}
    optimizer_state: dict[str, Any] = {}
    for part, optimizer, _ in trainer.parts():
        model |= get_model_state_dict(part)
        optimizer_state |= get_optimizer_state_dict(part, optimizer, options=OPTIONS)
    return {
        "model": model,
        "optimizer": optimizer_state,
        "step": trainer.step,
        "samples": trainer.microbatches.samples,
    }
