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
    """The most bytes of storages at once, in a step and outside of steps.

    where: answers (step, phase), 0 for the step where it is none. Trap: FSDP2 frees and fills by resize_() of a storage, which
    is
    no operator.
    """

    def __init__(self, where: Callable[[], tuple[int, str]]) -> None:
        self.peak = Peak(0, "")  # in a step
        self.peak_outside_of_steps = 0  # outside of steps, as while a model is built
        self._step_and_phase = where
        self._living_storages: dict[weakref.ref[Any], int] = {}
        self._bytes = 0

    @contextlib.contextmanager
    def noting_resizes(self) -> Iterator[None]:
        """Surround what is recorded: storages that change their size are noted meanwhile."""
        recorder = self
        resize = torch.UntypedStorage.resize_

        def resize_and_note(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
            made = resize(storage, size)
            if weakref.ref(storage) in recorder._living_storages:
                recorder._note_size(storage, size)
            return made

        torch.UntypedStorage.resize_ = resize_and_note
        try:
            yield
        finally:
            torch.UntypedStorage.resize_ = resize

    def note_results(self, results: Any) -> None:
        """Note the storages that an operator made: those that are there already are known."""
        for tensor in tree_leaves(results):
            if isinstance(tensor, torch.Tensor) and is_without_memory(tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                if weakref.ref(storage) not in self._living_storages:
                    self._note_size(storage, storage.nbytes())

    def _note_size(self, storage: torch.UntypedStorage, size: int) -> None:
        """Note a storage's present size, and the peak if there were never so many bytes."""
        storage_ref = weakref.ref(storage, self._note_freed)
        self._bytes += size - self._living_storages.pop(storage_ref, 0)
        self._living_storages[storage_ref] = size
        step, phase = self._step_and_phase()
        if not step:
            self.peak_outside_of_steps = max(self.peak_outside_of_steps, self._bytes)
        elif self._bytes > self.peak.bytes:
            self.peak = Peak(self._bytes, phase)

    def _note_freed(self, storage_ref: weakref.ref[Any]) -> None:
        self._bytes -= self._living_storages.pop(storage_ref, 0)
