"""Code that puts hooks on tensors that autograd saves for backward: recomputation does, and so does moving them to the host.

Every way to do that (torch.autograd.graph.saved_tensors_hooks, all that is made of it, the call beneath) ends in one function
of torch, which is called through its module.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from typing import Any

import torch

from harness.core.evidence.step import SavedTensorsHook
from harness.core.probe.clock import Account, Clock

PUSH_FUNCTION = "_push_saved_tensors_default_hooks"


class SavedTensorsRecorder:
    """Counts of hooks put on saved tensors, by phase, and by module and name of the code they are of."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._accounts: dict[Account, Counter[SavedTensorsHook]] = defaultdict(Counter)
        self._original: Any = None

    def install(self) -> None:
        """Patch the function of torch that all such hooks go through."""
        self._original = original = getattr(torch._C._autograd, PUSH_FUNCTION)

        def note_and_push(pack: Any, unpack: Any) -> None:
            self._note_hook(pack)
            original(pack, unpack)

        setattr(torch._C._autograd, PUSH_FUNCTION, note_and_push)

    def remove(self) -> None:
        """Put torch's function back. Nothing if it is back already."""
        if self._original is not None:
            setattr(torch._C._autograd, PUSH_FUNCTION, self._original)
        self._original = None

    def hooks_of(self, step: int) -> dict[SavedTensorsHook, int]:
        """Return how often each hook was put on in passes that trained in a step."""
        return dict(
            sum(
                (hooks for account, hooks in self._accounts.items() if account.trains_step(step)),
                Counter[SavedTensorsHook](),
            )
        )

    def _note_hook(self, pack: Any) -> None:
        self._accounts[self._clock.account][SavedTensorsHook(self._clock.phase(), *module_and_name_of(pack))] += 1


def module_and_name_of(hook: Any) -> tuple[str, str]:
    """Return the module of a hook, and the name of the outermost class or function that it is defined in."""
    defined = hook if hasattr(hook, "__qualname__") else type(hook)
    return defined.__module__, defined.__qualname__.partition(".")[0]
