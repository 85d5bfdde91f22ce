"""Gradients before clipping, parameters after each step, learning rate, memory: read at torch's own seams.

Gradients are copied at the first sign of their use: a call of torch's clipping functions, or an optimizer step, for which
backward.py has what they were before. They are copied again if more of backward follows such a call, for many trainers measure
the norm after each microbatch. For an optimizer that steps inside backward only its own gradients are copied. Whatever a
trainer does to them after that, clipping included, is judged by what it does to the parameters.

An optimizer may step master copies, from which the trainer then writes the model's parameters. These are copied when the next
step begins, and count as the step's update if they ever change there. A copy that is equal to a parameter is its master, and
the optimizer's state of the copy is the parameter's.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from torch.optim import optimizer as torch_optimizer

from harness.core.evidence.records import Resumed
from harness.core.evidence.step import UnsettledGradient
from harness.core.probe.backward import BackwardRecorder, Before
from harness.core.probe.clock import Clock
from harness.core.probe.host_copies import Copy, all_copied, all_read, can_be_read, copied, lies_on_device, read
from harness.core.probe.shards import noted, shards_of
from harness.core.probe.structure import local, named_parameters, sharded_parameters, stored
from harness.core.probe.unsettled import unsettled_gradients
from harness.core.probe.without_memory import place

CLIP_FUNCTIONS = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm", "clip_grads_with_norm_")
INNER = ("_get_total_norm", "_clip_grads_with_norm_")
"""What those call, which who imported them by name before comes to as well."""

_installed: list[ValueRecorder] = []


def note_gradients() -> None:
    """For the adapter of a trainer that, once backward has ended, alters gradients and then clips them, both by its own
    functions: to be called in between."""
    for recorder in _installed:
        recorder.copy_gradients(clipped_next=True)


def note_update(step: int | None = None) -> None:
    """For the adapter of a trainer whose optimizer steps on its own vectors (`note_shards`). Call it when parameters are what
    the step made of them, those that other ranks step on included. step: its number, if that is so only in the next step's
    forward pass; None: the present step."""
    for recorder in _installed:
        recorder.copy_update(step)


@contextlib.contextmanager
def reducing_gradients() -> Iterator[None]:
    """For the adapter of a trainer whose own functions reduce gradients over the data ranks when backward has ended: around
    these. What is moved meanwhile is judged as DDP's and FSDP's reductions are, which torch issues inside backward."""
    with contextlib.ExitStack() as stack:
        for recorder in _installed:
            stack.enter_context(recorder._clock.reducing_gradients())
        yield


@dataclass
class StepValues:
    """What of it lies on a GPU is read once the device was waited for. before: gradients at the end of backward, until
    they are compared with `gradients`. late: parameters were copied in the next step's forward pass, with whatever was done
    to them in between."""

    lr: float | Copy | None = None
    gradients: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    optimizer_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    changed: dict[str, Any] | None = None
    scaled: float | None = None
    before: Before | None = None
    late: bool = False
    unsettled: dict[str, UnsettledGradient] = field(default_factory=dict)
    clipped_after: int | None = None
    steps_on_copies: bool = False
    """Whether an optimizer stepped tensors that are no parameters of the model."""
    masters_state: int = 0
    """Bytes of the optimizer's state of master copies."""
    left: dict[str, Any] = field(default_factory=dict)
    """Trainable parameters that no optimizer stepped, where one stepped on tensors that are no parameters: as the next step
    finds them."""

    def compare(self) -> None:
        """Gradients with what they were."""
        if self.before is not None:
            self.gradients, self.scaled = self.before.against(all_read(self.gradients))
        self.before = None

    def read(self) -> None:
        self.compare()
        self.lr = float(read(self.lr)) if torch.is_tensor(self.lr) else self.lr
        self.gradients, self.parameters = all_read(self.gradients), all_read(self.parameters)
        self.left = all_read(self.left)
        if self.masters_state:
            self.memory["optimizer_state"] += self.masters_state
            self.masters_state = 0
        self.optimizer_state = {fqn: all_read(state) for fqn, state in self.optimizer_state.items()}
        if self.changed is not None:
            now = all_read(self.changed)
            self.changed = {f: value for f, value in now.items() if not same_array(value, self.parameters[f])}


class ValueRecorder:
    """Fills one StepValues per step for the parameters of `parts`. Where tensors have no memory, `shapes_only` is said."""

    def __init__(self, clock: Clock) -> None:
        self._compares = True
        self.steps: dict[int, StepValues] = {}
        self.parts: tuple[nn.Module, ...] = ()
        self.resumed: Resumed | None = None
        self.optimizers: dict[Optimizer, None] = {}
        self._before_copies: dict[str, Any] | None = None  # what no optimizer holds, before a first step on copies
        self._masters: dict[Optimizer, dict[str, torch.Tensor]] = {}  # by name of the parameter that is written from it
        self._rates: dict[Optimizer, float | Copy] = {}
        self._began: dict[Optimizer, int] = {}
        self._clock = clock
        self._backward = BackwardRecorder(clock, self._gradients)
        self._hooks: list[Any] = []
        self._patched: list[tuple[Any, str, Callable[..., Any]]] = []

    def install(self) -> None:
        self._hooks = [
            torch_optimizer.register_optimizer_step_pre_hook(self._before_optimizer),
            torch_optimizer.register_optimizer_step_post_hook(self._after_optimizer),
        ]
        for owner in (torch.nn.utils, torch.nn.utils.clip_grad):
            for name in (*CLIP_FUNCTIONS, *INNER):
                if hasattr(owner, name):
                    self._patch(owner, name)
        self._patch(FullyShardedDataParallel, "clip_grad_norm_")
        self._backward.install()
        _installed.append(self)

    def shapes_only(self) -> None:
        self._compares = self._backward.needed = False

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        self._backward.remove()
        if self in _installed:
            _installed.remove(self)
        self._hooks, self._patched = [], []

    def _patch(self, owner: Any, name: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def seen(*args: Any, **kwargs: Any) -> Any:
            self.copy_gradients(clipped_next=True)
            return original(*args, **kwargs)

        self._patched.append((owner, name, original))
        setattr(owner, name, seen)

    def watch_resumed(self) -> None:
        """Parameters as they are now; each optimizer's state when it first steps, for optimizers are not known before."""
        self.resumed = Resumed(all_copied(named_parameters(self.parts)), {})

    def _copy_resumed_state(self, optimizer: Optimizer) -> None:
        if self.resumed is None or self._clock.step != self._clock.start + 1:
            return
        add_states(self.resumed.optimizer_state, self._states(optimizer))

    def _owned(
        self, optimizer: Optimizer, shards: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> list[tuple[str, nn.Parameter]]:
        """shards: the present ones, where they were looked for already."""
        found = sharded_parameters(self.parts) if shards is None else shards
        names = {id(parameter): fqn for fqn, parameter in found}
        return [(names[id(p)], p) for group in optimizer.param_groups for p in group["params"] if id(p) in names]

    def _see_copies(self, optimizer: Optimizer) -> None:
        """Note whether the optimizer steps tensors that are no parameters of the model."""
        if not self.parts or any(noted(self.parts)):
            return
        shards = list(sharded_parameters(self.parts))
        held, stepped = {id(p) for _, p in shards}, {id(p) for g in optimizer.param_groups for p in g["params"]}
        if stepped <= held:
            return
        self._step().steps_on_copies = True
        free = [(fqn, p) for fqn, p in shards if p.requires_grad and id(p) not in stepped]
        if self._before_copies is None:
            self._before_copies = all_copied(free)
        self._find_masters(optimizer, free)

    def _find_masters(self, optimizer: Optimizer, free: Iterable[tuple[str, torch.Tensor]]) -> None:
        """free: parameters that the optimizer does not hold itself."""
        if not self._compares:
            return
        held = {id(p) for _, p in sharded_parameters(self.parts)}
        copies = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in held]
        masters = self._masters[optimizer] = {}
        for fqn, p in free:
            found = next((at for at, copy in enumerate(copies) if is_master(copy, p)), None)
            if found is not None:
                masters[fqn] = copies.pop(found)

    def _copy_left(self, step: StepValues) -> None:
        free = [(f, p) for f, p in sharded_parameters(self.parts) if p.requires_grad and f not in step.parameters]
        step.left = all_copied(free)
        for optimizer in self._masters:
            self._find_masters(optimizer, free)
        states = (state for optimizer in self._masters for state in self._states_of_masters(optimizer).values())
        values = (value for state in states for value in state.values())
        step.masters_state = held_bytes(value for value in values if torch.is_tensor(value) and value.dim())

    def _states_of_masters(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        return {fqn: optimizer.state.get(master, {}) for fqn, master in self._masters.get(optimizer, {}).items()}

    def _states(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        own = {fqn: optimizer.state.get(p, {}) for fqn, p in self._owned(optimizer)}
        return own | self._states_of_masters(optimizer)

    def _take_written_back(self) -> None:
        """Take what the next step finds for the step's update, if the trainer writes its copies into these parameters at all.

        Where they never change, the optimizer steps orphans, and nothing was updated.
        """
        written = [step for step in self.steps.values() if step.steps_on_copies and step.left]
        found = [all_read(self._before_copies or {}), *(step.left for step in written)]
        pairs = [(one[fqn], other[fqn]) for one, other in pairwise(found) for fqn in one.keys() & other.keys()]
        if all(same_array(one, other) for one, other in pairs):
            return
        for step in written:
            step.parameters |= step.left
            step.changed = step.changed or {}  # with whatever was done to them in between

    def _step(self, step: int | None = None) -> StepValues:
        return self.steps.setdefault(self._clock.step if step is None else step, StepValues())

    def _gradients(self) -> dict[str, torch.Tensor]:
        own = {fqn: p.grad for fqn, p in sharded_parameters(self._whole_parts()) if p.grad is not None}
        return own | {fqn: gradient for shards in noted(self.parts) for fqn, gradient in shards.gradients()}

    def _whole_parts(self) -> list[nn.Module]:
        """Return the parts whose parameters are the modules' own."""
        return [part for part in self.parts if shards_of(part) is None]

    def copy_gradients(self, *, clipped_next: bool) -> None:
        step = self._step()
        if clipped_next:
            self._backward.needed = False
            self._backward.drop()
        grown = step.clipped_after is not None and step.clipped_after < self._backward.ended
        if (step.gradients and not grown) or not self.parts:
            return
        step.clipped_after = self._backward.ended if clipped_next else None
        gradients = self._gradients()
        step.unsettled = unsettled_gradients(sharded_parameters(self._whole_parts()))
        step.gradients, step.before = all_copied(gradients.items()), self._backward.taken()
        if can_be_read(step.gradients) and can_be_read(step.before.gradients):
            step.compare()
        kept = [p.grad for _, p in named_parameters(self.parts)]  # whole ones also where shards are noted
        step.memory["gradients"] = held_bytes([*kept, *gradients.values()])

    def _copy_own_gradients(self, optimizer: Optimizer) -> None:
        """An optimizer steps inside backward: only its own gradients are complete by then, and gone when backward ends."""
        step, own = self._step(), self._owned(optimizer)
        step.gradients |= all_copied((fqn, p.grad) for fqn, p in own if p.grad is not None)
        step.memory["gradients"] = max(step.memory.get("gradients", 0), held_bytes(p.grad for _, p in own))

    def _before_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        if self._clock.phase() == "backward":
            self._copy_own_gradients(optimizer)
        else:
            self.copy_gradients(clipped_next=False)
        self._see_copies(optimizer)
        self._copy_resumed_state(optimizer)
        if "lr" in optimizer.param_groups[0]:  # torchtitan's containers of optimizers have none
            lr = optimizer.param_groups[0]["lr"]  # a tensor for those that are compiled
            self._rates[optimizer] = copied(lr) if torch.is_tensor(lr) else float(lr)
        self._began[optimizer] = self._clock.step
        self._clock.enter_optimizer()

    def _after_optimizer(self, optimizer: Optimizer, *_: Any) -> None:
        self._clock.leave_optimizer()
        self.optimizers[optimizer] = None
        # A closure given to step() trains inside of it: only now is it known which step this was.
        if optimizer in self._rates:
            self._step().lr = self._rates.pop(optimizer)
        trained_inside = self._began.pop(optimizer, self._clock.step) != self._clock.step
        if trained_inside and not self._step().gradients:
            self.copy_gradients(clipped_next=False)
        if any(noted(self.parts)):
            return  # on vectors, of which parameters are made later: copy_update
        step = self._step()
        shards = list(sharded_parameters(self.parts))
        owned = self._owned(optimizer, shards)
        frozen = [(fqn, p) for fqn, p in shards if not p.requires_grad]  # maybe in no group
        step.parameters |= all_copied((*owned, *frozen))
        held = (*named_parameters(self.parts), *shards)  # whole ones beside slices, where units stay gathered
        step.memory["parameters"] = held_bytes(p for _, p in held)
        states = [v for _, p in owned for v in optimizer.state.get(p, {}).values() if torch.is_tensor(v) and v.dim()]
        step.memory["optimizer_state"] = step.memory.get("optimizer_state", 0) + held_bytes(states)

    def copy_update(self, number: int | None) -> None:
        """Copy parameters and memory after a step, for model parts whose shards were noted."""
        parts = [part for part in self.parts if shards_of(part) is not None]
        if not parts:
            return
        step = self._step(number)
        if number is not None:
            step.late, step.changed = True, {}
        held = dict(sharded_parameters(parts))
        step.parameters |= all_copied(held.items())
        step.memory["parameters"] = held_bytes([*held.values(), *(p for _, p in named_parameters(parts))])
        states = (value for shards in noted(parts) for _, state in shards.state() for value in state.values())
        step.memory["optimizer_state"] = held_bytes(value for value in states if value.dim())

    def see_what_was_left(self) -> None:
        """Parameters as the step that just ended left them are compared, bit for bit. All that lie on a GPU are copied, and
        compared when that can be read; else only those that differ are copied."""
        finished = self.steps.get(self._clock.finished)
        if finished is not None and finished.steps_on_copies:
            self._copy_left(finished)
        ended = [number for number, step in self.steps.items() if step.parameters and not step.late]
        step = self.steps[max(ended)] if ended else None
        if step is not None and self._compares:
            now = ((fqn, p) for fqn, p in sharded_parameters(self.parts) if fqn in step.parameters)
            step.changed = all_copied((fqn, p) for fqn, p in now if not known_as_same(p, step.parameters[fqn]))

    def read(self) -> None:
        """All that was copied, of which that of a GPU is there once the device was waited for."""
        for step in self.steps.values():
            step.read()
        self._take_written_back()
        if self.resumed is not None:
            states = {fqn: all_read(state) for fqn, state in self.resumed.optimizer_state.items()}
            self.resumed = Resumed(all_read(self.resumed.parameters), states)

    def keep_final_state(self) -> None:
        """Optimizer state is copied when training has ended, and where it is saved: the checks derive that of each step from
        the gradients."""
        self._backward.drop()
        stepped = [number for number, step in self.steps.items() if step.parameters or step.left]
        for shards in noted(self.parts) if stepped else ():
            add_states(self.steps[max(stepped)].optimizer_state, dict(shards.state()))
        for optimizer in self.optimizers if stepped else ():
            add_states(self.steps[max(stepped)].optimizer_state, self._states(optimizer))


def add_states(known: dict[str, dict[str, Any]], states: dict[str, dict[str, Any]]) -> None:
    """An optimizer that only contains others has no state itself: torchtitan's, whose step comes first and last."""
    known |= {fqn: tensors(state) for fqn, state in states.items() if state or fqn not in known}


def known_as_same(tensor: torch.Tensor, recorded: Copy) -> bool:
    """False if comparing would wait for a device."""
    return isinstance(recorded, np.ndarray) and not lies_on_device(local(tensor)) and same_bits(tensor, recorded)


def is_master(copy: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the parameter is what its own format keeps of the copy. Waits for a device."""
    one, other = local(copy), local(parameter)
    return one.shape == other.shape and torch.equal(one.to(other), other)


def same_array(one: np.ndarray, other: np.ndarray) -> bool:
    return same_bits(torch.from_numpy(one), other)


def same_bits(tensor: torch.Tensor, recorded: np.ndarray) -> bool:
    tensor = local(tensor)
    one, other = tensor.float() if tensor.dtype == torch.bfloat16 else tensor, torch.from_numpy(recorded)
    same_kind = one.shape == other.shape and one.dtype == other.dtype
    if not same_kind:
        return False
    flat, size = one.reshape(-1), one.element_size()
    in_words = not (flat.numel() * size % 8 or flat.storage_offset() * size % 8)  # eight bytes are compared at once
    kind = torch.int64 if in_words else torch.uint8
    return torch.equal(_as_integers(flat, kind), _as_integers(other.reshape(-1), kind))


def _as_integers(flat: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Trap: FSDP1's views of no or one element may have stride 0, and torch 2.14 does not view those as another type."""
    few = flat.numel() < 2
    return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(kind) if few else flat.view(kind)


def tensors(state: dict[str, Any]) -> dict[str, Copy]:
    return all_copied((key, value) for key, value in state.items() if torch.is_tensor(value))


def held_bytes(tensors: Iterable[torch.Tensor | None]) -> int:
    """Bytes of the distinct storages behind the local parts."""
    storages = {}
    for tensor in tensors:
        for part in stored(tensor) if tensor is not None else ():
            storages[place(part)] = part.untyped_storage().nbytes()
    return sum(storages.values())
