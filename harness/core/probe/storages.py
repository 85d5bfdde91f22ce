"""How many bytes of tensors are there at once, at the most, where tensors have no memory: what kernels return, each storage
once, until it is freed.

An allocator's rounding and what kernels use meanwhile are not seen, nor integers that stay real.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves

from harness.core.probe.without_memory import is_without_memory


class Peak(NamedTuple):
    """bytes: the most at any moment of a step, and in which phase that was."""

    bytes: int
    phase: str


class StorageRecorder:
    """`where` answers (step, phase), 0 for the step where it is none. Trap: FSDP2 frees and fills by resize_() of a storage,
    which is no operator."""

    def __init__(self, where: Callable[[], tuple[int, str]]) -> None:
        self.most = Peak(0, "")  # in a step
        self.outside = 0  # outside of steps, as while a model is built
        self._where = where
        self._there: dict[weakref.ref[Any], int] = {}
        self._bytes = 0

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        recorder = self
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            made = resize(storage, size)
            if weakref.ref(storage) in recorder._there:
                recorder._note(storage, size)
            return made

        torch.UntypedStorage.resize_ = resize_and_note
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def made(self, results: Any) -> None:
        """Note the storages that an operator made: those that are there already are known."""
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and is_without_memory(tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if weakref.ref(storage) not in self._there:
                    self._note(storage, storage.nbytes())

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        storage_ref = weakref.ref(storage, self._gone)
        self._bytes += size - self._there.pop(storage_ref, 0)
        self._there[storage_ref] = size
        step, phase = self._where()
        if not step:
            self.outside = max(self.outside, self._bytes)
        elif self._bytes > self.most.bytes:
            self.most = Peak(self._bytes, phase)

    def _gone(self, storage_ref: weakref.ref[Any]) -> None:
        self._bytes -= self._there.pop(storage_ref, 0)
