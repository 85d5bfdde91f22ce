"""Memory of gathered parameters: the bytes of every parameter that are there when a model part's forward pass has ended. Also
the parameters that are still gathered after backward, as the first optimizer steps.

Read from storages, not from states: what a module registers as its parameter, and what FSDP keeps aside. FSDP1 shows
slices of a unit whose whole vector is still there; FSDP2 could register slices and not free the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from harness.core.evidence.step import AfterEvaluation, AfterForward
from harness.core.probe.clock import Account, Clock
from harness.core.probe.hooks import Hook
from harness.core.probe.shards import shards_of
from harness.core.probe.structure import (
    flat_parameter,
    fsdp2_groups,
    join_names,
    local_tensor_of,
    module_names,
    named_parameters,
    plain_fqn,
)
from harness.core.probe.without_memory import storage_address

_installed: list[GatheredRecorder] = []


def note_forward_continues() -> None:
    """Note that the forward pass ends here. For a loss that applies the model's output itself, after the model has returned."""
    for recorder in _installed:
        recorder.repeat_last_note()


ParameterInMemory = tuple[
    str, int, torch.Tensor
]  # fqn, bytes of it that are there, a tensor of the storage that they lie in


class GatheredRecorder:
    """What was gathered at the end of forward passes, of backward, and of evaluation, by step."""

    def __init__(self, clock: Clock, *, finished_only: bool = False) -> None:
        """finished_only: after forward, look only at units whose own forward pass is over (`measure_after_forward`)."""
        self._clock = clock
        self._finished_only = finished_only
        self._after_forward: dict[int, list[tuple[Account, AfterForward]]] = {}
        self.after_evaluation: list[AfterEvaluation] = []
        self._hooks: list[Any] = []
        self._parts: tuple[nn.Module, ...] = ()
        self._after_backward: dict[int, tuple[str, ...]] = {}
        self._last_part: nn.Module | None = None
        self._last_noted: list[tuple[Account, AfterForward]] = []

    def attach(self, parts: Iterable[nn.Module]) -> None:
        """Hook the parts.

        Forward hooks run in the order in which they were registered: FSDP's own, which frees, is there before."""
        self._parts = tuple(parts)
        self._hooks = [part.register_forward_hook(Hook(self.note_forward_end)) for part in self._parts]
        _installed.append(self)

    def remove(self) -> None:
        """Take the hooks out again. What was noted stays."""
        for hook in self._hooks:
            hook.remove()
        if self in _installed:
            _installed.remove(self)
        self._hooks = []

    def after_forward_of(self, step: int) -> tuple[AfterForward, ...]:
        """Return what was gathered at the end of each forward pass that trained in a step, in order."""
        return tuple(after for account, after in self._after_forward.get(step, ()) if account.trains_step(step))

    def gathered_after_backward(self, step: int) -> tuple[str, ...] | None:
        """Return the fqns of parameters that were still gathered after a step's backward; None if nothing was looked at."""
        return self._after_backward.get(step)

    def before_optimizer(self, _: Optimizer) -> None:
        """Note what is still gathered as an optimizer steps; nothing before parts are attached.

        An optimizer that steps inside backward comes too early: then the look is made when the step is over."""
        if self._parts and self._clock.phase() != "backward":
            self._note_gathered_after_backward(self._clock.step)

    def _note_gathered_after_backward(self, step: int) -> None:
        """Note the parameters that are still gathered, at the first call for a step."""
        if step not in self._after_backward:
            gathered_fqns: dict[str, None] = {}  # in order, each once: modules may share a unit
            for part in self._parts:
                gathered_fqns |= dict.fromkeys(_gathered_parameters(part))
            self._after_backward[step] = tuple(gathered_fqns)

    def note_forward_end(self, part: nn.Module, *_: Any) -> None:
        """Note what is gathered as a forward pass of this model part ends; nothing of a pass of evaluation."""
        self._last_part = part
        account = self._clock.account
        if account.kind != "evaluation":
            after = measure_after_forward(part, finished_only=self._finished_only)
            self._last_noted = self._after_forward.setdefault(account.step, [])
            self._last_noted.append((account, after))

    def note_leftovers(self, parts: Iterable[nn.Module]) -> None:
        """Note, between two steps, what is still gathered.

        Nothing follows a pass that trains nothing: what it gathered and did not free is there when the next step begins."""
        if not self._clock.has_evaluated:
            self._note_gathered_after_backward(self._clock.step)
            return
        for part in parts:
            after = measure_after_forward(part)
            step = self._clock.last_finished_step
            self.after_evaluation.append(
                AfterEvaluation(step, after.bytes, after.storage, tuple(_gathered_parameters(part)))
            )

    def repeat_last_note(self) -> None:
        """Measure again what the last pass that was noted left gathered. Nothing if that was one of evaluation, or none was."""
        if self._last_part is not None and self._last_noted and self._clock.account_of_last_pass.kind != "evaluation":
            account, _ = self._last_noted[-1]
            self._last_noted[-1] = (account, measure_after_forward(self._last_part))


def measure_after_forward(part: nn.Module, *, finished_only: bool = False) -> AfterForward:
    """Return the bytes of every parameter that are in memory when a forward pass has ended.

    finished_only: only of units whose own forward pass is over. What a loss applies itself, the output, is needed for a while
    yet."""
    bytes_by_fqn: dict[str, int] = {}
    storages: dict[int, int] = {}
    needed = set(_unfinished_unit_parameters(part)) if finished_only else set()
    for fqn, size, tensor in _parameters_in_memory(part):
        if fqn in needed:
            continue
        storage = tensor.untyped_storage()
        bytes_by_fqn[fqn] = max(bytes_by_fqn.get(fqn, 0), size if storage.nbytes() else 0)
        if storage.nbytes():
            storages[storage_address(tensor)] = storage.nbytes()
    return AfterForward(bytes_by_fqn, sum(storages.values()))


def _unfinished_unit_parameters(part: nn.Module) -> Iterator[str]:
    """Yield the parameters of FSDP2's units of which some module ran, and not yet all."""
    names = module_names(part)
    for module in names:
        for group in fsdp2_groups(module):
            if group._training_state.name == "FORWARD":
                module_infos = [parameter._module_info for parameter in group.fsdp_params]
                yield from (join_names(names[info.module], info.param_name) for info in module_infos)


def _parameters_in_memory(part: nn.Module) -> Iterator[ParameterInMemory]:
    """Yield each parameter with the bytes of it that are there and a tensor of that storage; several for one of FSDP.

    Quantized tensors are left out: they have no storage themselves.
    """
    names = module_names(part)
    for fqn, parameter in named_parameters([part]):
        tensor = local_tensor_of(parameter)
        if not is_traceable_wrapper_subclass(tensor):  # a quantized one has no storage itself
            yield fqn, tensor.numel() * tensor.element_size(), tensor
    if (shards := shards_of(part)) is not None:
        yield from ((name, shard.numel() * shard.element_size(), shard) for name, shard in shards.parameters())
    for module in names:
        yield from _fsdp1_storages(module, names)
        yield from _fsdp2_storages(module, names)


def _gathered_parameters(part: nn.Module) -> Iterator[str]:
    """Yield the parameters of which memory holds what FSDP gathered, whole or over some of the ranks."""
    names = module_names(part)
    for module in names:
        gathered_fqns = {
            name for name, size, vector in _fsdp1_storages(module, names) if size and vector.untyped_storage().nbytes()
        }
        yield from sorted(gathered_fqns)
        for group in fsdp2_groups(module):
            for parameter in group.fsdp_params:
                has_outputs = any(output.untyped_storage().nbytes() for output in parameter.all_gather_outputs)
                if has_outputs or parameter.sharded_state.name == "SHARDED_POST_FORWARD":
                    owner = parameter._module_info
                    yield join_names(names[owner.module], owner.param_name)


def _fsdp1_storages(module: nn.Module, names: dict[nn.Module, str]) -> Iterator[ParameterInMemory]:
    """Yield the whole vector of an FSDP1 unit, and the rank's part of it, for each of its parameters."""
    flat = flat_parameter(module)
    if hasattr(flat, "_full_param_padded"):
        full_vector = flat._full_param_padded
        for fqn, shape in zip(flat._fqns, flat._shapes, strict=True):
            name = join_names(names[module], plain_fqn(fqn))
            yield name, shape.numel() * full_vector.element_size(), full_vector
            yield name, 0, flat._local_shard


def _fsdp2_storages(module: nn.Module, names: dict[nn.Module, str]) -> Iterator[ParameterInMemory]:
    """Yield the rank's part of every parameter, and what it was gathered into, which is emptied rather than thrown away."""
    for group in fsdp2_groups(module):
        for fsdp_parameter in group.fsdp_params:
            owner = fsdp_parameter._module_info
            name = join_names(names[owner.module], owner.param_name)
            yield name, 0, fsdp_parameter._sharded_param_data
            for output in fsdp_parameter.all_gather_outputs:
                elements = min(output.numel(), fsdp_parameter._orig_size.numel())  # the rest is padding
                yield name, elements * output.element_size(), output
