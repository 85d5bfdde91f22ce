"""A loss that applies the model's output itself, chunk by chunk: to the probe that is the end of the forward pass.

For the adapter of a trainer with such a loss, where the model returns hidden states. What the loss does up to its cross
entropy, and after it, is the forward pass (in autograd's engine: backward, as ever); the cross entropy is not.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from harness.core.probe import losses, resharding


def forward(loss: Callable[..., Any]) -> Callable[..., Any]:
    """The same method (self, hidden, labels, ..), whose calls end forward passes."""

    @functools.wraps(loss)
    def called(self: Any, hidden: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _at_depth(1):
            value = loss(self, hidden, labels, *args, **kwargs)
        resharding.forward_goes_on()
        return value

    return called


def no_forward(cross_entropy: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, called within such a loss and no part of the forward pass."""

    @functools.wraps(cross_entropy)
    def called(*args: Any, **kwargs: Any) -> Any:
        with _at_depth(0):
            return cross_entropy(*args, **kwargs)

    return called


@contextlib.contextmanager
def _at_depth(depth: int) -> Iterator[None]:
    clocks = [recorder._clock for recorder in losses._installed]
    before = [clock.forward_depth for clock in clocks]
    for clock in clocks:
        clock.forward_depth = depth
    try:
        yield
    finally:
        for clock, was in zip(clocks, before, strict=True):
            clock.forward_depth = was
