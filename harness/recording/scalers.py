"""What loss scalers do: by what they multiply a loss, and which steps they leave out because a gradient is not finite."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from harness.core.probe.clock import Clock
from harness.recording.compiling import not_compiled


def see_scalers(clock: Clock, note: Callable[[torch.Tensor], None]) -> None:
    """Call note with each step's scale. Once a scaler is updated its optimizers have stepped, or will not: passes since the
    last step trained nothing then. Trap: FSDP1's scaler has an update of its own."""
    step = torch.amp.GradScaler.step

    @not_compiled
    @functools.wraps(step)
    def stepped(scaler: Any, *args: Any, **kwargs: Any) -> Any:
        scale = getattr(scaler, "_scale", None)
        if isinstance(scale, torch.Tensor):  # a scaler that is turned off has none
            note(scale)
        return step(scaler, *args, **kwargs)

    def seen(update: Any) -> Any:
        @not_compiled
        @functools.wraps(update)
        def updated(scaler: Any, *args: Any, **kwargs: Any) -> Any:
            clock.skip()
            return update(scaler, *args, **kwargs)

        return updated

    torch.amp.GradScaler.step = stepped
    for kind in (torch.amp.GradScaler, ShardedGradScaler):
        kind.update = seen(kind.update)
