"""Hooks on a trainer's modules that its copies of them lack.

A copy of a model (an average of the weights, a teacher, torch.save of the whole) has copies of its hooks, and of all they
are bound to. The copy is another model: nothing of it is observed, and copying must go on working.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Hook:
    """A hook that calls its action; a copied or pickled one does nothing."""

    def __init__(self, action: Callable[..., Any]) -> None:
        self._action = action

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._action(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return Hook, (do_nothing,)


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """A hook that changes nothing."""
