"""Checkpoints in torch's distributed format: model, optimizer, finished steps and data position.

Every rank writes what it holds, under the reference's names, so another layout can read it. `step_000004` is complete
if and only if it contains .metadata, which is written last. The schedule is a function of the finished steps.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

# Flat keys (state.<fqn>.exp_avg), so that the parts of a pipeline can be merged and split anew.
OPTIONS = StateDictOptions(flatten_optimizer_state_dict=True)


class Part(NamedTuple):
    """A stage of this rank's pipeline, or the whole model, and what trains it."""

    model: nn.Module
    optimizer: Optimizer
    scheduler: LRScheduler


class Counters(NamedTuple):
    """Finished steps, and samples that all ranks together have drawn."""

    step: int
    samples: int


def save(parts: Sequence[Part], counters: Counters, folder: Path) -> Path:
    """Write the checkpoint folder/step_NNNNNN and return its path. Call it on every rank."""
    target = folder / f"step_{counters.step:06d}"
    dcp.save(state_of(parts, counters), checkpoint_id=target)
    return target


def save_async(parts: Sequence[Part], counters: Counters, folder: Path, group: dist.ProcessGroup | None) -> Future[Any]:
    """Copy the state now, write folder/step_NNNNNN in the background, and return the future.

    Call it on every rank, once the last one is written. group: on which no other thread communicates. Trap: on the
    default one, torch's, collectives of two threads would mix.
    """
    target = folder / f"step_{counters.step:06d}"
    return dcp.async_save(state_of(parts, counters), checkpoint_id=target, process_group=group)


def resume(parts: Sequence[Part], checkpoint: Path) -> Counters:
    """Load a checkpoint into the parts' models, optimizers and schedulers; return its counters.

    Raises ValueError if it is unreadable. Call it on every rank, before the first step. Trap: get_optimizer_state_dict
    makes a fresh optimizer's state by calling its step() with gradients of zero.
    """
    state = state_of(parts, Counters(step=0, samples=0))
    read(state, checkpoint)
    for part in parts:
        set_model(part, state["model"])
        set_optimizer_state_dict(part.model, part.optimizer, state["optimizer"], options=OPTIONS)
        continue_schedule(part.scheduler, state["step"])
    return Counters(state["step"], state["samples"])


def load_model(parts: Sequence[Part], checkpoint: Path) -> None:
    """Load only the weights of this checkpoint into the parts; all else stays new.

    Call it on every rank; ValueError as in `resume`.
    """
    state = {"model": model_of(parts)}
    read(state, checkpoint)
    for part in parts:
        set_model(part, state["model"])


def set_model(part: Part, model: dict[str, Any]) -> None:
    """Load a part's parameters from `model`, which has those of all parts, by fqn. KeyError if one is missing."""
    parameters_of_part = {fqn: model[fqn] for fqn in get_model_state_dict(part.model)}
    set_model_state_dict(part.model, parameters_of_part, options=StateDictOptions(strict=True))


def read(state: dict[str, Any], checkpoint: Path) -> None:
    """Read a checkpoint into the state, in place. Raises ValueError if it cannot be read.

    torch gathers the exceptions of all ranks into one: only the first is reported.
    """
    try:
        dcp.load(state, checkpoint_id=checkpoint)
    except CheckpointException as error:
        rank, (cause, *_) = next(iter(error.failures.items()))
        damage = f"{type(cause).__name__} on rank {rank}: {cause}"
        raise ValueError(
            f"{checkpoint}: damaged or of another model: {damage}; delete it to go on from an older one"
        ) from error


def continue_schedule(scheduler: LRScheduler, finished: int) -> None:
    """Set the scheduler to its state after `finished` steps; the optimizer's rates stay as they are.

    Trap: a scheduler's own state dict lists a rate for every parameter group, and another layout may have more groups.
    """
    rates = [group["lr"] for group in scheduler.optimizer.param_groups]
    progress = {"last_epoch": finished, "_step_count": finished + 1, "_last_lr": rates}
    scheduler.load_state_dict(scheduler.state_dict() | progress)


def latest(folder: Path) -> Path:
    """Return the folder of the complete checkpoint of the highest step. Raises ValueError if there is none."""
    complete = [path for path in folder.glob("step_*") if re.fullmatch(r"step_\d+", path.name)]
    complete = [path for path in complete if (path / ".metadata").exists()]
    if not complete:
        raise ValueError(f"{folder}: no complete checkpoint (step_*/.metadata) to resume from")
    return max(complete, key=lambda path: int(path.name.removeprefix("step_")))


def state_of(parts: Sequence[Part], counters: Counters) -> dict[str, Any]:
    """Return the state that a checkpoint has: "model", "optimizer", "step" and "samples".

    Its tensors are the parts' own, not copies: dcp.load writes into them.
    """
    optimizer_state: dict[str, Any] = {}
    for part in parts:
        optimizer_state |= get_optimizer_state_dict(part.model, part.optimizer, options=OPTIONS)
    return {"model": model_of(parts), "optimizer": optimizer_state, **counters._asdict()}


def model_of(parts: Sequence[Part]) -> dict[str, Any]:
    """Return the parameters of all parts, by fqn."""
    model: dict[str, Any] = {}
    for part in parts:
        model |= get_model_state_dict(part.model)
    return model
