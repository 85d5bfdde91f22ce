"""Copies of weights that are freed before a step ends, and how many bytes of them there are at once. They are made in the step,
or between two steps and last into the second.

A kernel sits in front of the two operators that all copying comes down to, on any device: copy_ (clone, deepcopy, contiguous,
conversions) and cat (stack, parameters_to_vector). Whether the source is a weight shows in its storage: a parameter's, or
what FSDP gathers into. A weak reference to its storage shows how long a copy lives, so that nothing is kept for it and
nothing is waited for. Not counted are copies that FSDP makes to gather from, those that DDP sends out when it is made, and the
probe's.

Not seen are results of arithmetic, what compiled code copies, and casts inside forward and backward, which are how mixed
precision computes. What outlives its step is kept, and no longer this file's business.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness.core.probe.activity import _BELOW
from harness.core.probe.clock import Clock
from harness.core.probe.structure import fsdp2_groups, local, module_names, named_parameters
from harness.core.probe.without_memory import is_computed, is_without_memory

OWN = (__package__, "torch.distributed.fsdp", "torch.distributed._composable", "torch.distributed.utils")  # not counted
AT_BEGIN = "before forward"  # beside the phases in which copies are made
FINENESS = 16  # copies are counted to a 16th of all weights, so that one of many is not looked for each time
PLAIN = (torch.Tensor, nn.Parameter)
WRAPPED = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class CopyRecorder:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: tuple[nn.Module, ...] = ()
        self._weights: dict[int, StorageWeakRef] = {}  # by address, which is not used again while there is a reference
        self._grain = 0.0
        self._step = 0
        self._alive: dict[StorageWeakRef, int] = {}
        self._kept: dict[StorageWeakRef, int] = {}
        self._total = 0
        self._steps: dict[int, dict[str, int]] = {}
        self._library: torch.library.Library | None = None

    def install(self) -> None:
        """Put a kernel in front of both operators, below autograd and DTensor, as the recorder of activities does."""
        self._library = torch.library.Library("aten", "IMPL")
        for name, kernel in (("copy_", self._copy), ("cat", self._cat)):
            operator = getattr(torch.ops.aten, name).default
            self._library.impl(name, functools.partial(kernel, operator), "BackendSelect", with_keyset=True)

    def attach(self, parts: Iterable[nn.Module]) -> None:
        self._parts = tuple(parts)
        shards = [local(parameter) for _, parameter in named_parameters(self._parts)]
        self._grain = sum(shard.numel() * shard.element_size() for shard in shards) / FINENESS

    def remove(self) -> None:
        self.close()

    def close(self) -> None:
        """Take the kernels out again. Nothing if they are out already."""
        if self._library is not None:
            self._library._destroy()
            self._library = None

    def of_step(self, step: int) -> dict[str, int] | None:
        """Return the most bytes of copies at once, by phase of the step; by AT_BEGIN, the bytes that were there before and
        were freed since. None if the probe was not attached."""
        self._enter(0)
        return dict(self._steps.get(step, {})) if self._parts else None

    def _copy(self, operator: Any, keyset: Any, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Note and call copy_.

        Trap: a number that torch wrapped in a tensor arrives as the number, which the operator does not take."""
        source = source if isinstance(source, torch.Tensor) else _as_tensor(source)
        self.copied(target, source, sys._getframe().f_back)
        return operator.redispatch(keyset & _BELOW, target, source, *args, **kwargs)

    def _cat(self, operator: Any, keyset: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        result = operator.redispatch(keyset & _BELOW, sources, *args, **kwargs)
        self.joined(result, sources, sys._getframe().f_back)
        return result

    def copied(self, target: torch.Tensor, source: torch.Tensor, caller: types.FrameType | None) -> None:
        if self._is_in_a_step() and self._is_weight(source) and not self._is_weight(target):
            self._note(target, source.numel(), source.dtype, caller)

    def joined(self, result: torch.Tensor, sources: Iterable[torch.Tensor], caller: types.FrameType | None) -> None:
        if self._is_in_a_step() and (weights := [source for source in sources if self._is_weight(source)]):
            self._note(result, sum(weight.numel() for weight in weights), weights[0].dtype, caller)

    def _is_in_a_step(self) -> bool:
        if not self._parts or self._clock.step <= self._clock.start:
            return False
        if self._step != self._clock.step:
            self._enter(self._clock.step)
        return True

    def _enter(self, step: int) -> None:
        """Begin the account of a step.

        What the last step made and has not freed is retained: it was there when the most was, and is subtracted from that."""
        self._forget()
        peak_bytes = self._steps.get(self._step, {})
        peak_bytes.update({phase: max(0, size - self._total) for phase, size in peak_bytes.items()})
        if freed_bytes := sum(size for storage, size in self._kept.items() if storage.expired()):
            self._steps.setdefault(self._step, {})[AT_BEGIN] = freed_bytes
        self._kept = {storage: size for storage, size in self._kept.items() if not storage.expired()} | self._alive
        self._alive = {}
        self._total = 0
        self._step = step
        weights = weight_storages(self._parts) if step else ()
        self._weights = {storage._cdata: StorageWeakRef(storage) for storage in weights}

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        if type(tensor) not in PLAIN and not (is_without_memory(tensor) and is_computed(tensor)):
            return False  # a compiler's
        return tensor.untyped_storage()._cdata in self._weights and is_computed(tensor)

    def _note(self, copy: torch.Tensor, numel: int, dtype: torch.dtype, caller: types.FrameType | None) -> None:
        if _module(caller).startswith(OWN):
            return
        phase = self._clock.phase()
        storage = StorageWeakRef(copy.untyped_storage())
        is_cast_of_mixed_precision = copy.dtype != dtype and phase in ("forward", "backward", "pipeline")
        if is_cast_of_mixed_precision or storage in self._kept:
            return
        size = numel * copy.element_size()
        self._total += size - self._alive.get(storage, 0)
        self._alive[storage] = size
        peak_bytes = self._steps.setdefault(self._clock.step, {})
        if self._total >= peak_bytes.get(phase, 0) + self._grain:
            self._forget()
            peak_bytes[phase] = max(peak_bytes.get(phase, 0), self._total)

    def _forget(self) -> None:
        """Drop the copies that are freed."""
        self._alive = {storage: size for storage, size in self._alive.items() if not storage.expired()}
        self._total = sum(self._alive.values())


def _module(caller: types.FrameType | None) -> str:
    """Return the caller's module; autograd's own threads have no caller."""
    return str(caller.f_globals.get("__name__", "")) if caller else ""


def _as_tensor(number: Any) -> torch.Tensor:
    """Wrap a number as torch does."""
    return torch.scalar_tensor(number, dtype=WRAPPED[type(number)])


def weight_storages(parts: Iterable[nn.Module]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of weights: the process's own, and those into which FSDP2 gathers, again and again."""
    for part in parts:
        for _, parameter in named_parameters([part]):
            yield local(parameter).untyped_storage()
        for module in module_names(part):
            for group in fsdp2_groups(module):
                for fsdp_parameter in group.fsdp_params:
                    yield fsdp_parameter._sharded_param_data.untyped_storage()
                    yield from (output.untyped_storage() for output in fsdp_parameter.all_gather_outputs)
