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

import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from harness.core.probe.clock import Clock
from harness.core.probe.kernels import KEYS_BELOW, OperatorKernels
from harness.core.probe.structure import fsdp2_groups, local_tensor_of, module_names, named_parameters
from harness.core.probe.without_memory import has_real_computation, is_without_memory

UNCOUNTED_MODULES = (
    __package__,
    "torch.distributed.fsdp",
    "torch.distributed._composable",
    "torch.distributed.utils",
)  # not counted
BEFORE_FORWARD = "before forward"  # beside the phases in which copies are made
COPY_RESOLUTION = 16  # copies are counted to a 16th of all weights, so that one of many is not looked for each time
PLAIN_TENSOR_TYPES = (torch.Tensor, nn.Parameter)
DTYPE_OF_NUMBER = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}


class CopyRecorder:
    """The bytes of copies of weights that are there at once, the most in each phase of each step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._parts: tuple[nn.Module, ...] = ()
        self._weights: dict[int, StorageWeakRef] = {}  # by address, which is not used again while there is a reference
        self._smallest_increase = 0.0
        self._step = 0
        self._living_copies: dict[StorageWeakRef, int] = {}
        self._copies_of_earlier_steps: dict[StorageWeakRef, int] = {}
        self._living_bytes = 0
        self._peaks_by_step: dict[int, dict[str, int]] = {}
        self._kernels = OperatorKernels("aten")

    def install(self) -> None:
        """Put a kernel in front of both operators."""
        self._kernels.install({"copy_": self._copy_kernel, "cat": self._cat_kernel})

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Take the model parts whose weights are looked for. Nothing is counted before."""
        self._parts = tuple(parts)
        shards = [local_tensor_of(parameter) for _, parameter in named_parameters(self._parts)]
        self._smallest_increase = sum(shard.numel() * shard.element_size() for shard in shards) / COPY_RESOLUTION

    def remove(self) -> None:
        self.close()

    def close(self) -> None:
        """Take the kernels out again. Nothing if they are out already."""
        self._kernels.close()

    def peak_copies_of(self, step: int) -> dict[str, int] | None:
        """Return the most bytes of copies at once, by phase of the step. None if the probe was not attached.

        The key BEFORE_FORWARD has the bytes that were there before and were freed since.
        """
        self._enter_step(0)
        return dict(self._peaks_by_step.get(step, {})) if self._parts else None

    def _copy_kernel(self, operator: Any, keyset: Any, target: Any, source: Any, *args: Any, **kwargs: Any) -> Any:
        """Note and call copy_.

        Trap: a number that torch wrapped in a tensor arrives as the number, which the operator does not take."""
        source = source if isinstance(source, torch.Tensor) else _as_tensor(source)
        self.note_copy(target, source, sys._getframe().f_back)
        return operator.redispatch(keyset & KEYS_BELOW, target, source, *args, **kwargs)

    def _cat_kernel(self, operator: Any, keyset: Any, sources: Any, *args: Any, **kwargs: Any) -> Any:
        """Call cat, then note the result if weights are among its sources."""
        result = operator.redispatch(keyset & KEYS_BELOW, sources, *args, **kwargs)
        self.note_concatenation(result, sources, sys._getframe().f_back)
        return result

    def note_copy(self, target: torch.Tensor, source: torch.Tensor, caller: types.FrameType | None) -> None:
        """Count the target of a copy whose source is a weight, and whose target is none. Nothing outside of steps."""
        if self._enter_current_step() and self._is_weight(source) and not self._is_weight(target):
            self._note_bytes(target, source.numel(), source.dtype, caller)

    def note_concatenation(
        self, result: torch.Tensor, sources: Iterable[torch.Tensor], caller: types.FrameType | None
    ) -> None:
        """Count the result of a concatenation by its parts that are weights. Nothing outside of steps, or without weights."""
        if self._enter_current_step() and (weights := [source for source in sources if self._is_weight(source)]):
            self._note_bytes(result, sum(weight.numel() for weight in weights), weights[0].dtype, caller)

    def _enter_current_step(self) -> bool:
        if not self._parts or self._clock.step <= self._clock.start_step:
            return False
        if self._step != self._clock.step:
            self._enter_step(self._clock.step)
        return True

    def _enter_step(self, step: int) -> None:
        """Begin the account of a step.

        What the last step made and has not freed is retained: it was there when the most was, and is subtracted from that."""
        self._forget_freed()
        peak_bytes = self._peaks_by_step.get(self._step, {})
        peak_bytes.update({phase: max(0, size - self._living_bytes) for phase, size in peak_bytes.items()})
        if freed_bytes := sum(size for storage, size in self._copies_of_earlier_steps.items() if storage.expired()):
            self._peaks_by_step.setdefault(self._step, {})[BEFORE_FORWARD] = freed_bytes
        self._copies_of_earlier_steps = {
            storage: size for storage, size in self._copies_of_earlier_steps.items() if not storage.expired()
        } | self._living_copies
        self._living_copies = {}
        self._living_bytes = 0
        self._step = step
        weights = weight_storages(self._parts) if step else ()
        self._weights = {storage._cdata: StorageWeakRef(storage) for storage in weights}

    def _is_weight(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor lies in the storage of a weight. False for tensors that a compiler traces with."""
        if type(tensor) not in PLAIN_TENSOR_TYPES and not (is_without_memory(tensor) and has_real_computation(tensor)):
            return False  # a compiler's
        return tensor.untyped_storage()._cdata in self._weights and has_real_computation(tensor)

    def _note_bytes(self, copy: torch.Tensor, numel: int, dtype: torch.dtype, caller: types.FrameType | None) -> None:
        """Count a copy among those that live, and raise the phase's peak.

        Left out: copies that UNCOUNTED_MODULES make, casts within a pass, and storages that an earlier step made.
        numel, dtype: of the weights that were copied.
        """
        if _module_of_caller(caller).startswith(UNCOUNTED_MODULES):
            return
        phase = self._clock.phase()
        storage = StorageWeakRef(copy.untyped_storage())
        is_cast_of_mixed_precision = copy.dtype != dtype and phase in ("forward", "backward", "pipeline")
        if is_cast_of_mixed_precision or storage in self._copies_of_earlier_steps:
            return
        size = numel * copy.element_size()
        self._living_bytes += size - self._living_copies.get(storage, 0)
        self._living_copies[storage] = size
        peak_bytes = self._peaks_by_step.setdefault(self._clock.step, {})
        if self._living_bytes >= peak_bytes.get(phase, 0) + self._smallest_increase:
            self._forget_freed()
            peak_bytes[phase] = max(peak_bytes.get(phase, 0), self._living_bytes)

    def _forget_freed(self) -> None:
        """Drop the copies that are freed."""
        self._living_copies = {storage: size for storage, size in self._living_copies.items() if not storage.expired()}
        self._living_bytes = sum(self._living_copies.values())


def _module_of_caller(caller: types.FrameType | None) -> str:
    """Return the caller's module; autograd's own threads have no caller."""
    return str(caller.f_globals.get("__name__", "")) if caller else ""


def _as_tensor(number: Any) -> torch.Tensor:
    """Wrap a number as torch does."""
    return torch.scalar_tensor(number, dtype=DTYPE_OF_NUMBER[type(number)])


def weight_storages(parts: Iterable[nn.Module]) -> Iterator[torch.UntypedStorage]:
    """Yield the storages of weights: the process's own, and those into which FSDP2 gathers, again and again."""
    for part in parts:
        for _, parameter in named_parameters([part]):
            yield local_tensor_of(parameter).untyped_storage()
        for module in module_names(part):
            for group in fsdp2_groups(module):
                for fsdp_parameter in group.fsdp_params:
                    yield fsdp_parameter._sharded_param_data.untyped_storage()
                    yield from (output.untyped_storage() for output in fsdp_parameter.all_gather_outputs)
