"""Losses that apply the model's output themselves, chunk by chunk: to the probe that is the end of the forward pass.

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
    """Return the method (self, hidden, labels, ..) with calls that are the end of a forward pass."""

    @functools.wraps(loss)
    def in_forward_pass(self: Any, hidden: torch.Tensor, labels: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        with _with_forward_depth(1):
            value = loss(self, hidden, labels, *args, **kwargs)
        resharding.note_forward_continues()
        return value

    return in_forward_pass


def no_forward(cross_entropy: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function with calls that are no part of the forward pass, though they lie within such a loss."""

    @functools.wraps(cross_entropy)
    def outside_of_forward(*args: Any, **kwargs: Any) -> Any:
        with _with_forward_depth(0):
            return cross_entropy(*args, **kwargs)

    return outside_of_forward


@contextlib.contextmanager
def _with_forward_depth(depth: int) -> Iterator[None]:
    """Set the depth of forward calls on the clocks of all installed probes; put the old depths back afterwards."""
    clocks = [recorder._clock for recorder in losses._installed]
    old_depths = [clock.forward_depth for clock in clocks]
    for clock in clocks:
        clock.forward_depth = depth
    try:
        yield
    finally:
        for clock, old_depth in zip(clocks, old_depths, strict=True):
            clock.forward_depth = old_depth
