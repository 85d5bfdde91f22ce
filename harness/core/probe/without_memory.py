"""Tensors without memory, of which only shapes and types are known: what a rank computes with that runs alone.

torch's FakeTensors are those, and a compiler's are too while it traces: which ones a trainer computes with is said once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

_modes: list[Any] = []


@contextmanager
def registered_mode(mode: Any) -> Iterator[None]:
    """Surround what a trainer computes with this FakeTensorMode's tensors."""
    _modes.append(mode)
    try:
        yield
    finally:
        _modes.remove(mode)


def is_without_memory(tensor: torch.Tensor) -> bool:
    return type(tensor).__name__ == "FakeTensor"


def has_real_computation(tensor: torch.Tensor) -> bool:
    """Return whether the trainer computes with this tensor. Others are a compiler's, which traces with them."""
    if is_without_memory(tensor):
        return any(getattr(tensor, "fake_mode", None) is mode for mode in _modes)
    return tensor.device.type != "meta"


def records_gradients(module: nn.Module) -> bool:
    """Return whether a call of it now records gradients of parameters that can be stepped. An evaluation, a frozen model and
    the meta device, where a trainer counts the operations of a copy, do not."""
    return torch.is_grad_enabled() and any(p.requires_grad and p.device.type != "meta" for p in module.parameters())


def storage_address(tensor: torch.Tensor) -> int:
    """Return a number for the storage behind a tensor, the same for tensors that share memory: its address if it has one."""
    storage = tensor.untyped_storage()
    return storage._cdata if is_without_memory(tensor) else storage.data_ptr()
