"""A bound on the computation that the search for one cause may need.

Passes are counted and not seconds, so that a search that ends early ends at the same point on every machine.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class BudgetExceeded(Exception):
    """The bound is reached: no more is computed."""


_LEFT: ContextVar[list[int] | None] = ContextVar("left", default=None)


@contextlib.contextmanager
def logits_budget(logits: int) -> Iterator[None]:
    """Allow the block's forward passes this many logits in all; afterwards the bound from before holds again.

    A pass with twice as many counts as two passes.
    """
    token = _LEFT.set([logits])
    try:
        yield
    finally:
        _LEFT.reset(token)


def spend_logits(logits: int) -> None:
    """Count the logits of one pass. Raises BudgetExceeded if the bound is exceeded. Without a bound it does nothing."""
    remaining = _LEFT.get()
    if remaining is None:
        return
    remaining[0] -= logits
    if remaining[0] < 0:
        raise BudgetExceeded
