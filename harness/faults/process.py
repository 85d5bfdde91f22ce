"""Ranks that die, hang or leave: each must end in bounded time with the culprit named and its victims not blamed."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

from harness.faults import Fired, fault


def _before_step(step: int, rank: int, do: Callable[[], None]) -> None:
    """Calls `do` on one rank just before its optimizer steps for the `step`-th time."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    seen: list[Any] = []

    def hook(*args: Any) -> None:
        seen.append(None)
        if len(seen) == step and int(os.environ.get("RANK", 0)) == rank:
            do()

    register_optimizer_step_pre_hook(hook)


@fault(
    breaks="rank 1 is killed in step 2, as by the kernel when memory runs out",
    bug="Z-class: a rank dies, the others wait for it",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 died by SIGKILL",
)
def rank_killed_in_step_2(fired: Fired) -> None:
    def die() -> None:
        fired()
        os.kill(os.getpid(), signal.SIGKILL)

    _before_step(2, 1, die)


@fault(
    breaks="rank 1 stops for ever in step 2, the others wait in their next collective",
    bug="Z-class: a rank stalls (a data loader, a file system, a lock)",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 hung",
    hangs=True,
)
def rank_hangs_in_step_2(fired: Fired) -> None:
    def stall() -> None:
        fired()
        time.sleep(3600)

    _before_step(2, 1, stall)


@fault(
    breaks="rank 1 raises in step 2",
    bug="Z-class: one rank raises, the others see a lost connection",
    case="fsdp_2",
    caught_by="completed",
    named="rank 1 raised",
)
def rank_raises_in_step_2(fired: Fired) -> None:
    def fail() -> None:
        fired()
        raise FloatingPointError("a deliberate error in step 2")

    _before_step(2, 1, fail)
