"""Names of torch that an older torchtitan imports and today's torch has no more, on any device: old name -> what it was."""

from __future__ import annotations

import importlib

RENAMED = {("torch.distributed.pipelining", "ScheduleFlexibleInterleaved1F1B"): "ScheduleInterleaved1F1B"}


def bridge() -> None:
    for (module_name, old), new in RENAMED.items():
        module = importlib.import_module(module_name)
        if not hasattr(module, old):
            setattr(module, old, getattr(module, new))
