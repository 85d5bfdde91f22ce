"""Copies of tensors on the host, made without waiting for the device that a tensor lies on.

The copy of a tensor in the host's memory is numpy's at once. From a GPU it goes into pinned memory, in the current stream,
after all earlier work. The process goes on, and the copy is read when all is over and the device was waited for, once. Memory
that is freed meanwhile is reused in the same stream only, after the copy.
"""

from __future__ import annotations

import itertools
import weakref
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from harness.core.probe.structure import as_numpy, local_tensor_of, numpy_dtype

HostCopy: TypeAlias = np.ndarray | torch.Tensor
"""numpy's where it can be read; a tensor where the device is still to be waited for."""

BATCH_BYTES = 2**20
"""Bytes. From 4 MB on, numpy asks for huge pages: where memory is short, the process waits until there are some."""

_pending_copies: weakref.WeakValueDictionary[int, torch.Tensor] = weakref.WeakValueDictionary()


def is_on_device(tensor: torch.Tensor) -> bool:
    return tensor.device.type != "cpu"


def copy_to_host(tensor: torch.Tensor) -> HostCopy:
    """Return a copy of a rank's tensor on the host, complete at once from the host's memory, from a device once it was
    waited for.
    """
    tensor = local_tensor_of(tensor)
    if not is_on_device(tensor):
        return as_numpy(tensor)
    copy = tensor.to("cpu", non_blocking=True, copy=True)  # torch pins what it copies to in this way
    _pending_copies[id(copy)] = copy
    return copy


def copy_all_to_host(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, HostCopy]:
    """Return copies by name. Copies of one dtype in the host's memory are made by few calls, each into one array."""
    local_tensors = {name: local_tensor_of(tensor) for name, tensor in tensors}
    batches: dict[tuple[torch.dtype, int], dict[str, torch.Tensor]] = {}
    bytes_so_far: Counter[torch.dtype] = Counter()
    for name, local_tensor in local_tensors.items():
        if (
            type(local_tensor) in (torch.Tensor, nn.Parameter)
            and local_tensor.layout is torch.strided
            and not is_on_device(local_tensor)
        ):
            batches.setdefault((local_tensor.dtype, bytes_so_far[local_tensor.dtype] // BATCH_BYTES), {})[name] = (
                local_tensor
            )
            bytes_so_far[local_tensor.dtype] += local_tensor.numel() * local_tensor.element_size()
    joint_copies: dict[str, np.ndarray] = {}
    for batch in batches.values():
        joint_copies |= _copy_in_one_array(batch)
    return {
        name: joint_copies[name] if name in joint_copies else copy_to_host(local_tensor)
        for name, local_tensor in local_tensors.items()
    }


def clone_all(tensors: Mapping[str, torch.Tensor]) -> dict[str, HostCopy]:
    """Return copies where each tensor lies: on a device, to be copied from there if they are needed, or the host's."""
    local_tensors = {name: local_tensor_of(tensor) for name, tensor in tensors.items()}
    clones = {name: local_tensor.clone() for name, local_tensor in local_tensors.items() if is_on_device(local_tensor)}
    host_copies = copy_all_to_host(
        (name, local_tensor) for name, local_tensor in local_tensors.items() if name not in clones
    )
    return {name: clones.get(name, host_copies.get(name)) for name in local_tensors}


def _copy_in_one_array(tensors: Mapping[str, torch.Tensor]) -> dict[str, np.ndarray]:
    """Return what `as_numpy` makes of each of these dense tensors of one dtype."""
    flat = [tensor.reshape(-1) for tensor in tensors.values()]
    joint_array = np.empty(sum(tensor.numel() for tensor in flat), numpy_dtype(flat[0].dtype))
    if flat[0].dtype == torch.bfloat16:
        torch.from_numpy(joint_array).copy_(torch.cat(flat))
    else:
        torch.cat(flat, out=torch.from_numpy(joint_array))
    ends = itertools.accumulate(tensor.numel() for tensor in flat)
    return {
        name: joint_array[end - tensor.numel() : end].reshape(tuple(tensor.shape))
        for (name, tensor), end in zip(tensors.items(), ends, strict=True)
    }


def pending_copies() -> list[torch.Tensor]:
    """Return the probe's own tensors on the host, which live until they are read."""
    return list(_pending_copies.values())


def are_readable(copies: Mapping[str, HostCopy]) -> bool:
    """Return whether all copies can be read now, without waiting for a device."""
    return all(isinstance(copy, np.ndarray) for copy in copies.values())


def wait_for_copies() -> None:
    """Wait for all copies of this process."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def read_copy(copy: HostCopy) -> np.ndarray:
    """Return a copy as an array. One from a device is complete only after `wait_for_copies`."""
    return copy if isinstance(copy, np.ndarray) else as_numpy(copy)


def read_all(copies: Mapping[str, HostCopy]) -> dict[str, np.ndarray]:
    return {name: read_copy(copy) for name, copy in copies.items()}
