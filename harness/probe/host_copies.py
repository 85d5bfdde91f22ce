"""Copies of tensors on the host, made without waiting for the device that a tensor lies on.

The copy of a tensor in the host's memory is numpy's at once. From a GPU it goes into pinned memory, in the current stream,
after all earlier work. The process goes on, and the copy is read when all is over and the device was waited for, once. Memory
that is freed meanwhile is reused in the same stream only, after the copy.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch

from harness.probe.structure import as_numpy, local

Copy: TypeAlias = np.ndarray | torch.Tensor
"""numpy's where it can be read; a tensor where the device is still to be waited for."""

_pending: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def lies_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def copied(tensor: torch.Tensor) -> Copy:
    tensor = local(tensor)
    if not lies_on_device(tensor):
        return as_numpy(tensor)
    copy = tensor.to("cpu", non_blocking=True, copy=True)  # torch pins what it copies to in this way
    _pending[id(copy)] = copy
    return copy


def all_copied(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, Copy]:
    return {name: copied(tensor) for name, tensor in tensors}


def pending() -> list[torch.Tensor]:
    """The probe's own tensors on the host, which live until they are read."""
    return list(_pending.values())


def can_be_read(copies: Mapping[str, Copy]) -> bool:
    return all(isinstance(copy, np.ndarray) for copy in copies.values())


def wait() -> None:
    """Wait for all copies of this process."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def read(copy: Copy) -> np.ndarray:
    return copy if isinstance(copy, np.ndarray) else as_numpy(copy)


def all_read(copies: Mapping[str, Copy]) -> dict[str, np.ndarray]:
    return {name: read(copy) for name, copy in copies.items()}
