"""What tensors of floating-point numbers this process keeps once training has ended, whoever keeps them.

Python's garbage collector is asked, so a module's attribute, a trainer's list and a closure are all the same. Not seen is
what only C++ holds, and what is kept as something else than a tensor.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Iterable, Iterator

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.evidence.records import HeldTensor
from harness.core.probe.shards import noted, tensors_of
from harness.core.probe.structure import flat_parameter, fsdp2_groups, named_parameters
from harness.core.probe.without_memory import is_computed, place

LET_GO = 0.1
"""Seconds. gloo's thread frees what a collective filled, after that has been waited for. It needs the interpreter's lock
for it, which the training thread holds meanwhile. On two loaded cores, 10 of 300 gathered tensors without a reference in
Python still lived after garbage had been collected, and none did 10 ms later."""


def beside(
    parts: Iterable[nn.Module],
    optimizers: Iterable[Optimizer],
    own: Iterable[torch.Tensor],
    *,
    evaluated: bool,
    patient: bool = False,
) -> tuple[HeldTensor, ...]:
    """One of each storage that is not behind a parameter, its gradient or optimizer state, nor the probe's own; largest
    first. evaluated: whether a pass that trains nothing came last, after which FSDP1 leaves the root's vector gathered, as
    it does after forward. patient: what will have been let go of in a moment is not kept."""
    gc.collect()  # what no reference reaches is not kept
    if patient:
        time.sleep(LET_GO)
    known = set(_places(_accounted(parts, optimizers))) | set(_places(own))
    known |= set(_places(fsdp1_vectors(parts))) if evaluated else set()
    found: dict[int, HeldTensor] = {}
    for tensor in _living():
        at, size = place(tensor), tensor.untyped_storage().nbytes()
        if size and at not in known:
            dtype = str(tensor.dtype).removeprefix("torch.")
            found.setdefault(at, HeldTensor(tuple(tensor.shape), dtype, size))
    return tuple(sorted(found.values(), key=lambda held: -held.bytes))


def _accounted(parts: Iterable[nn.Module], optimizers: Iterable[Optimizer]) -> Iterator[torch.Tensor]:
    """What FSDP2 gathers into is no copy, and whether evaluation left it there is recorded separately. Then a module's
    parameters are the gathered ones, and the sharded ones are found here."""
    groups = (group for part in parts for module in part.modules() for group in fsdp2_groups(module))
    sharded = [held for group in groups for held in group.fsdp_params]
    for parameter in (
        *(parameter for _, parameter in named_parameters(parts)),
        *(held.sharded_param for held in sharded),
    ):
        yield parameter
        if parameter.grad is not None:
            yield parameter.grad
    for shards in noted(parts):
        yield from tensors_of(shards)
    yield from (gathered for held in sharded for gathered in held.all_gather_outputs)
    for optimizer in optimizers:
        for state in optimizer.state.values():
            yield from (value for value in state.values() if torch.is_tensor(value))


def fsdp1_vectors(parts: Iterable[nn.Module]) -> Iterator[torch.Tensor]:
    """What FSDP1 gathers each unit into; whether evaluation left it there is recorded separately."""
    for module in (module for part in parts for module in part.modules()):
        flat = flat_parameter(module)
        if hasattr(flat, "_full_param_padded"):
            yield flat._full_param_padded


def _places(tensors: Iterable[torch.Tensor]) -> Iterator[int]:
    yield from (place(plain) for tensor in tensors for plain in _plain(tensor))


def _plain(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """What a tensor made of others (a DTensor, a quantized one) is made of."""
    if is_traceable_wrapper_subclass(tensor):
        parts = (getattr(tensor, name) for name in tensor.__tensor_flatten__()[0])
        yield from (plain for part in parts if isinstance(part, torch.Tensor) for plain in _plain(part))
    else:
        yield tensor


def _living() -> Iterator[torch.Tensor]:
    """Yield tensors with their own memory. Trap: isinstance() would ask proxies of other libraries what they stand for."""
    for thing in gc.get_objects():
        if issubclass(type(thing), torch.Tensor) and not is_traceable_wrapper_subclass(thing):
            traced = type(thing).__name__ == "FunctionalTensor" or not is_computed(thing)
            if thing.is_floating_point() and thing.layout is torch.strided and not traced:
                yield thing
