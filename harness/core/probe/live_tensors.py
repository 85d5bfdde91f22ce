"""What tensors of floating-point numbers this process keeps once training has ended, whoever keeps them.

Python's garbage collector is asked, so a module's attribute, a trainer's list and a closure are all the same. Not seen is
what only C++ holds, and what is kept as something else than a tensor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.evidence.records import HeldTensor
from harness.core.probe.shards import all_shard_tensors, noted_shards
from harness.core.probe.structure import flat_parameter, fsdp2_groups, named_parameters
from harness.core.probe.without_memory import has_real_computation, storage_address

SECONDS_TO_LET_GO = 0.1
"""Seconds. gloo's thread frees what a collective filled, after that has been waited for. It needs the interpreter's lock
for it, which the training thread holds meanwhile. On two loaded cores, 10 of 300 gathered tensors without a reference in
Python still lived after garbage had been collected, and none did 10 ms later."""


def find_unaccounted_tensors(
    parts: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    probe_tensors: Iterable[torch.Tensor],
    *,
    evaluated: bool,
    patient: bool = False,
) -> tuple[HeldTensor, ...]:
    """Return one tensor of each storage that is neither behind a parameter, its gradient or optimizer state, nor the probe's
    own; largest first.

    evaluated: whether a pass that trains nothing came last, after which FSDP1 leaves the root's vector gathered, as it does
    after forward. patient: wait a moment first, so that what is about to be freed does not count."""
    gc.collect()  # what no reference reaches is not kept
    if patient:
        time.sleep(SECONDS_TO_LET_GO)
    known_addresses = set(_addresses(_accounted_tensors(parts, optimizers))) | set(_addresses(probe_tensors))
    known_addresses |= set(_addresses(fsdp1_gathered_vectors(parts))) if evaluated else set()
    unaccounted_by_address: dict[int, HeldTensor] = {}
    for tensor in _living_tensors():
        address = storage_address(tensor)
        storage_bytes = tensor.untyped_storage().nbytes()
        if storage_bytes and address not in known_addresses:
            dtype = str(tensor.dtype).removeprefix("torch.")
            unaccounted_by_address.setdefault(address, HeldTensor(tuple(tensor.shape), dtype, storage_bytes))
    return tuple(sorted(unaccounted_by_address.values(), key=lambda live_tensor: -live_tensor.bytes))


def _accounted_tensors(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """Yield parameters, their gradients, optimizer state, shards that were noted, and what FSDP2 gathers into.

    What FSDP2 gathers into is no copy, and whether evaluation left it there is recorded separately. While it is there, a
    module's parameters are the gathered ones, and the sharded ones are found here."""
    fsdp_parameters: list[Any] = []
    for part in parts:
        for module in part.modules():
            for group in fsdp2_groups(module):
                fsdp_parameters += group.fsdp_params
    for parameter in (
        *(parameter for _, parameter in named_parameters(parts)),
        *(fsdp_parameter.sharded_param for fsdp_parameter in fsdp_parameters),
    ):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for shards in noted_shards(parts):
        yield from all_shard_tensors(shards)
    for fsdp_parameter in fsdp_parameters:
        yield from fsdp_parameter.all_gather_outputs
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def fsdp1_gathered_vectors(parts: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the vector into which FSDP1 gathers each unit. Whether evaluation left it there is recorded separately."""
    for part in parts:
        for module in part.modules():
            flat = flat_parameter(module)
            if hasattr(flat, "_full_param_padded"):
                yield flat._full_param_padded


def _addresses(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    for tensor in tensors:
        yield from (storage_address(plain) for plain in _inner_tensors_of(tensor))


def _inner_tensors_of(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the plain tensors of which a tensor (a DTensor, a quantized one) is made; a plain tensor itself."""
    if is_traceable_wrapper_subclass(tensor):
        for name in tensor.__tensor_flatten__()[0]:
            inner_tensor = getattr(tensor, name)
            if isinstance(inner_tensor, torch.Tensor):
                yield from _inner_tensors_of(inner_tensor)
    else:
        yield tensor


def _living_tensors() -> Iterator[torch.Tensor]:
    """Yield tensors with their own memory. Trap: isinstance() would ask proxies of other libraries what they stand for."""
    for candidate in gc.get_objects():
        if issubclass(type(candidate), torch.Tensor) and not is_traceable_wrapper_subclass(candidate):
            is_traced = type(candidate).__name__ == "FunctionalTensor" or not has_real_computation(candidate)
            if candidate.is_floating_point() and candidate.layout is torch.strided and not is_traced:
                yield candidate
