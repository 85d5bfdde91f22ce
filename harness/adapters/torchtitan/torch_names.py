"""Patches of torch for names and signatures that differ from those that a version of torchtitan was written for, on any device.

MOVED: what an older torchtitan imports and today's torch has elsewhere: where it was -> where it is. The others are
newer than torch 2.13, and left alone where they are there.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from typing import Any

import torch
import torch.distributed as dist

MOVED = {
    "torch.distributed.pipelining.ScheduleFlexibleInterleaved1F1B": (
        "torch.distributed.pipelining.ScheduleInterleaved1F1B"
    ),
    "torch.distributed.tensor.experimental._attention.create_cp_block_mask": (
        "torch.distributed.tensor.experimental._context_parallel._attention._create_cp_block_mask"
    ),
}


def add_missing_names() -> None:
    """Patch torch with all names and signatures of this module that it lacks."""
    for old, new in MOVED.items():
        module_name, _, name = old.rpartition(".")
        module = importlib.import_module(module_name)
        if not hasattr(module, name):
            now, _, today = new.rpartition(".")
            setattr(module, name, getattr(importlib.import_module(now), today))
    if not hasattr(dist, "set_timeout"):
        dist.set_timeout = lambda timeout, group=None: None
    take_microbatches()


def take_microbatches() -> None:
    """Patch torch's pipeline schedules so that `step` takes lists of microbatches, unless it already does."""
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, PipelineScheduleSingle

    for kind in (PipelineScheduleSingle, PipelineScheduleMulti):
        if "arg_mbs" not in inspect.signature(kind.step).parameters:
            kind.step = accepting_microbatches(kind.step)


def accepting_microbatches(step: Any) -> Any:
    """Return a schedule's `step`, changed to take microbatches that are cut already: arg_mbs, kwarg_mbs and target_mbs."""

    @functools.wraps(step)
    def taking(self: Any, *args: Any, arg_mbs: Any = None, kwarg_mbs: Any = None, target_mbs: Any = None, **rest: Any):
        """Call the step with microbatches that are cut already. Targets are joined, as this torch cuts them again.

        Without kwarg_mbs the step is called as it is.
        """
        if kwarg_mbs is None:
            return step(self, *args, **rest)
        self._split_inputs = lambda *_: (arg_mbs or [()] * len(kwarg_mbs), kwarg_mbs)
        return step(self, target=torch.cat(target_mbs) if target_mbs else None, **rest)

    return taking
