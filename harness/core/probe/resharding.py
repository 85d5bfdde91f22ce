"""What is kept gathered: the bytes of every parameter in memory when a model part's forward pass has ended. Also the parameters
that are still gathered after backward, as the first optimizer steps.

Read from storages, not from states: what a module registers as its parameter, and what FSDP keeps aside. FSDP1 shows
slices of a unit whose whole vector is still there; FSDP2 could register slices and not free the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.evidence.step import AfterEvaluation, AfterForward
from harness.core.probe.clock import Account, Clock
from harness.core.probe.hooks import Hook
from harness.core.probe.shards import shards_of
from harness.core.probe.structure import (
    flat_parameter,
    fsdp2_groups,
    joined,
    local,
    module_names,
    named_parameters,
    plain_fqn,
)
from harness.core.probe.without_memory import place

_installed: list[GatheredRecorder] = []


def forward_goes_on() -> None:
    """For a loss that applies the model's output itself: the forward pass that was over ends here."""
    for recorder in _installed:
        recorder.note_again()


Found = tuple[str, int, torch.Tensor]  # fqn, bytes of it that are there, a tensor of the storage that they lie in


class GatheredRecorder:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._seen: list[tuple[Account, AfterForward]] = []
        self.after_evaluation: list[AfterEvaluation] = []
        self._hooks: list[Any] = []
        self._parts: tuple[nn.Module, ...] = ()
        self._after_backward: dict[int, tuple[str, ...]] = {}
        self._last: nn.Module | None = None

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Forward hooks run in the order in which they were registered: FSDP's own, which frees, is there before."""
        self._parts = tuple(parts)
        self._hooks = [part.register_forward_hook(Hook(self._note)) for part in self._parts]
        self._hooks.append(torch_optimizer.register_optimizer_step_pre_hook(self._optimizer_steps))
        _installed.append(self)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        if self in _installed:
            _installed.remove(self)
        self._hooks = []

    def of_step(self, step: int) -> tuple[AfterForward, ...]:
        return tuple(after for account, after in self._seen if account.of(step))

    def after_backward(self, step: int) -> tuple[str, ...] | None:
        return self._after_backward.get(step)

    def _optimizer_steps(self, *_: Any) -> None:
        """One that steps inside backward comes too early: then the look is made when the step is over."""
        if self._clock.phase() != "backward":
            self._look_after_backward(self._clock.step)

    def _look_after_backward(self, step: int) -> None:
        if step not in self._after_backward:
            left = (name for part in self._parts for name in _gathered(part))
            self._after_backward[step] = tuple(dict.fromkeys(left))  # modules may share a unit

    def _note(self, part: nn.Module, *_: Any) -> None:
        self._last = part
        if self._clock.account.kind != "evaluation":
            self._seen.append((self._clock.account, after_forward(part)))

    def see_what_was_left(self, parts: Iterable[nn.Module]) -> None:
        """Nothing follows a pass that trains nothing: what it gathered and did not free is there when the next step begins."""
        if not self._clock.evaluated:
            self._look_after_backward(self._clock.step)
        for part in parts if self._clock.evaluated else ():
            left, step = after_forward(part), self._clock.finished
            self.after_evaluation.append(AfterEvaluation(step, left.bytes, left.storage, tuple(_gathered(part))))

    def note_again(self) -> None:
        if self._last is not None and self._seen and self._clock.of_last_pass.kind != "evaluation":
            self._seen[-1] = (self._seen[-1][0], after_forward(self._last))


def after_forward(part: nn.Module, *, over: bool = False) -> AfterForward:
    """over: only of units whose own forward pass is over. What a loss applies itself, the output, is needed for a while yet."""
    held: dict[str, int] = {}
    storages: dict[int, int] = {}
    needed = set(_needed_yet(part)) if over else set()
    for fqn, size, tensor in _in_memory(part):
        if fqn in needed:
            continue
        storage = tensor.untyped_storage()
        held[fqn] = max(held.get(fqn, 0), size if storage.nbytes() else 0)
        if storage.nbytes():
            storages[place(tensor)] = storage.nbytes()
    return AfterForward(held, sum(storages.values()))


def _needed_yet(part: nn.Module) -> Iterator[str]:
    """Parameters of FSDP2's units of which some module ran, and not yet all."""
    names = module_names(part)
    for group in (group for module in names for group in fsdp2_groups(module)):
        if group._training_state.name == "FORWARD":
            infos = [parameter._module_info for parameter in group.fsdp_params]
            yield from (joined(names[info.module], info.param_name) for info in infos)


def _in_memory(part: nn.Module) -> Iterator[Found]:
    names = module_names(part)
    for fqn, parameter in named_parameters([part]):
        tensor = local(parameter)
        if not is_traceable_wrapper_subclass(tensor):  # a quantized one has no storage itself
            yield fqn, tensor.numel() * tensor.element_size(), tensor
    if (shards := shards_of(part)) is not None:
        yield from ((name, held.numel() * held.element_size(), held) for name, held in shards.parameters())
    for module in names:
        yield from _kept_by_fsdp1(module, names)
        yield from _kept_by_fsdp2(module, names)


def _gathered(part: nn.Module) -> Iterator[str]:
    """Parameters of which memory holds what FSDP gathered, whole or over some of the ranks."""
    names = module_names(part)
    for module in names:
        whole = {
            name for name, size, vector in _kept_by_fsdp1(module, names) if size and vector.untyped_storage().nbytes()
        }
        yield from sorted(whole)
        for parameter in (each for group in fsdp2_groups(module) for each in group.fsdp_params):
            outputs = any(output.untyped_storage().nbytes() for output in parameter.all_gather_outputs)
            if outputs or parameter.sharded_state.name == "SHARDED_POST_FORWARD":
                yield joined(names[parameter._module_info.module], parameter._module_info.param_name)


def _kept_by_fsdp1(module: nn.Module, names: dict[nn.Module, str]) -> Iterator[Found]:
    """The unit's whole vector, and the rank's part of it."""
    flat = flat_parameter(module)
    if hasattr(flat, "_full_param_padded"):
        whole = flat._full_param_padded
        for fqn, shape in zip(flat._fqns, flat._shapes, strict=True):
            name = joined(names[module], plain_fqn(fqn))
            yield name, shape.numel() * whole.element_size(), whole
            yield name, 0, flat._local_shard


def _kept_by_fsdp2(module: nn.Module, names: dict[nn.Module, str]) -> Iterator[Found]:
    """The rank's part of every parameter, and what it was gathered into, which is emptied rather than thrown away."""
    for group in fsdp2_groups(module):
        for parameter in group.fsdp_params:
            owner = parameter._module_info
            name = joined(names[owner.module], owner.param_name)
            yield name, 0, parameter._sharded_param_data
            for gathered in parameter.all_gather_outputs:
                elements = min(gathered.numel(), parameter._orig_size.numel())  # the rest is padding
                yield name, elements * gathered.element_size(), gathered
