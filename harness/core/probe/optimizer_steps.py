"""The steps of torch's optimizers: the clock is in the phase "optimizer" meanwhile, and observers look before and after.

An optimizer of another class than torch.optim.Optimizer is not seen. One that has others step for it steps around them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from harness.core.probe.clock import Clock
from harness.core.probe.inputs import tensors_in

OptimizerAction = Callable[[Optimizer], Any]


class OptimizerSteps:
    """Hooks on the steps of all optimizers of this process, while it is installed."""

    def __init__(self, clock: Clock, before: Iterable[OptimizerAction], after: Iterable[OptimizerAction]) -> None:
        """Take what is called with the optimizer, in this order: `before` its step begins, and `after` it has ended.

        To the clock the step has not begun when `before` is called, and is over when `after` is."""
        self._clock = clock
        self._before = tuple(before)
        self._after = tuple(after)
        self._hooks: list[Any] = []

    def install(self) -> None:
        """Register the hooks with torch, for all optimizers."""
        self._hooks = [
            torch_optimizer.register_optimizer_step_pre_hook(self._begin_step),
            torch_optimizer.register_optimizer_step_post_hook(self._end_step),
        ]

    def remove(self) -> None:
        """Take the hooks out again. Nothing if they are out already."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _begin_step(self, optimizer: Optimizer, *_: Any) -> None:
        for act in self._before:
            act(optimizer)
        self._clock.enter_optimizer()

    def _end_step(self, optimizer: Optimizer, *_: Any) -> None:
        self._clock.leave_optimizer()
        for act in self._after:
            act(optimizer)


def stepped_tensors(optimizer: Optimizer) -> Iterator[torch.Tensor]:
    """Yield the tensors that an optimizer steps, group by group."""
    for group in optimizer.param_groups:
        yield from group["params"]


def state_tensors(states: Iterable[Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors with dims in what optimizers keep of parameters. Shampoo's states are maps of maps.

    A number, such as the count of steps, has no dims and is left out."""
    for state in states:
        yield from (tensor for _, tensor in tensors_in("", state) if tensor.dim())
