"""How much is computed anew to find one cause. Passes are counted and not seconds, so that a search that ends early ends at
the same place on every machine."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


class Spent(Exception):
    """No more is computed."""


_LEFT: ContextVar[list[int] | None] = ContextVar("left", default=None)


@contextlib.contextmanager
def at_most(logits: int) -> Iterator[None]:
    """Allow forward passes that give so many logits. What computes twice as many in a pass has half as many passes."""
    token = _LEFT.set([logits])
    try:
        yield
    finally:
        _LEFT.reset(token)


def spend(logits: int) -> None:
    """Spend the logits of one pass. Outside of a bound it does nothing."""
    left = _LEFT.get()
    if left is None:
        return
    left[0] -= logits
    if left[0] < 0:
        raise Spent
