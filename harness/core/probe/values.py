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
from torch.optim import Optimizer

from harness.core.evidence.records import Resumed
from harness.core.evidence.step import UnsettledGradient
from harness.core.probe.backward import BackwardRecorder, GradientsBefore
from harness.core.probe.clipping import CLIP_FUNCTIONS, INNER_CLIP_FUNCTIONS, ClipFunction, observe_clipping
from harness.core.probe.clock import Clock
from harness.core.probe.hooks import do_nothing
from harness.core.probe.host_copies import (
    HostCopy,
    are_readable,
    copy_all_to_host,
    copy_to_host,
    is_on_device,
    read_all,
    read_copy,
)
from harness.core.probe.optimizer_steps import state_tensors, stepped_tensors
from harness.core.probe.shards import noted_shards, shards_of
from harness.core.probe.structure import dense_tensors_of, local_tensor_of, named_parameters, sharded_parameters
from harness.core.probe.unsettled import unsettled_gradients
from harness.core.probe.without_memory import storage_address

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
        recorder.copy_shards_after_update(step)


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

    lr: float | HostCopy | None = None
    gradients: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    optimizer_state: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    changed_since: dict[str, Any] | None = None
    scale_factor: float | None = None
    gradients_before: GradientsBefore | None = None
    is_copied_late: bool = False
    unsettled: dict[str, UnsettledGradient] = field(default_factory=dict)
    passes_at_clipping: int | None = None
    steps_on_copies: bool = False
    """Whether an optimizer stepped tensors that are no parameters of the model."""
    masters_state: int = 0
    """Bytes of the optimizer's state of master copies."""
    parameters_left: dict[str, Any] = field(default_factory=dict)
    """Trainable parameters that no optimizer stepped, where one stepped on tensors that are no parameters: as the next step
    finds them."""

    def compare_gradients(self) -> None:
        """Compare the gradients with those at the end of backward, if these were copied."""
        if self.gradients_before is not None:
            self.gradients, self.scale_factor = self.gradients_before.compare_with(read_all(self.gradients))
        self.gradients_before = None

    def read_copies(self) -> None:
        """Read all copies of the step into arrays. Of the parameters copied before the next step, keep those that changed."""
        self.compare_gradients()
        self.lr = float(read_copy(self.lr)) if torch.is_tensor(self.lr) else self.lr
        self.gradients = read_all(self.gradients)
        self.parameters = read_all(self.parameters)
        self.parameters_left = read_all(self.parameters_left)
        if self.masters_state:
            self.memory["optimizer_state"] += self.masters_state
            self.masters_state = 0
        self.optimizer_state = {fqn: read_all(state) for fqn, state in self.optimizer_state.items()}
        if self.changed_since is not None:
            copies_now = read_all(self.changed_since)
            self.changed_since = {
                fqn: value for fqn, value in copies_now.items() if not are_same_arrays(value, self.parameters[fqn])
            }


class ValueRecorder:
    """Fills one StepValues per step for the parameters of `parts`.

    Where tensors have no memory, `record_shapes_only()` is called.
    """

    def __init__(self, clock: Clock) -> None:
        self._compares_values = True
        self.steps: dict[int, StepValues] = {}
        self.parts: tuple[nn.Module, ...] = ()
        self.resumed: Resumed | None = None
        self.optimizers: dict[Optimizer, None] = {}
        self._before_copies: dict[str, Any] | None = None  # what no optimizer holds, before a first step on copies
        self._masters: dict[Optimizer, dict[str, torch.Tensor]] = {}  # by name of the parameter that is written from it
        self._learning_rates: dict[Optimizer, float | HostCopy] = {}
        self._step_at_begin: dict[Optimizer, int] = {}
        self._clock = clock
        self._backward = BackwardRecorder(clock, self._present_gradients)
        self._stop_clipping: Callable[[], None] = do_nothing

    def install(self) -> None:
        """Patch torch's clipping functions, and copy gradients after backward passes from now on."""
        self._stop_clipping = observe_clipping(self._with_gradients_copied, (*CLIP_FUNCTIONS, *INNER_CLIP_FUNCTIONS))
        self._backward.install()
        _installed.append(self)

    def record_shapes_only(self) -> None:
        """Compare no values from now on: tensors have no memory."""
        self._compares_values = self._backward.is_needed = False

    def remove(self) -> None:
        """Take all patches out again. What was copied stays."""
        self._stop_clipping()
        self._stop_clipping = do_nothing
        self._backward.remove()
        if self in _installed:
            _installed.remove(self)

    def _with_gradients_copied(self, _: str, original: ClipFunction) -> ClipFunction:
        """Return a clipping function before which the gradients are copied."""

        @functools.wraps(original)
        def copy_gradients_and_call(*args: Any, **kwargs: Any) -> Any:
            self.copy_gradients(clipped_next=True)
            return original(*args, **kwargs)

        return copy_gradients_and_call

    def watch_resumed(self) -> None:
        """Copy the parameters as they are now. Optimizers are not known yet: each one's state is copied when it first steps."""
        self.resumed = Resumed(copy_all_to_host(named_parameters(self.parts)), {})

    def _copy_resumed_state(self, optimizer: Optimizer) -> None:
        """Copy an optimizer's state in the first step after a checkpoint was read; nothing otherwise."""
        if self.resumed is None or self._clock.step != self._clock.start_step + 1:
            return
        add_states(self.resumed.optimizer_state, self._states_by_fqn(optimizer))

    def _parameters_of(
        self, optimizer: Optimizer, shards: Iterable[tuple[str, torch.Tensor]] | None = None
    ) -> list[tuple[str, torch.Tensor]]:
        """Return the model's parameters that an optimizer steps, with their names.

        shards: the present ones, where they were looked for already."""
        named_shards = sharded_parameters(self.parts) if shards is None else shards
        names = {id(shard): fqn for fqn, shard in named_shards}
        return [(names[id(parameter)], parameter) for parameter in stepped_tensors(optimizer) if id(parameter) in names]

    def _note_steps_on_copies(self, optimizer: Optimizer) -> None:
        """Note whether the optimizer steps tensors that are no parameters of the model."""
        if not self.parts or any(noted_shards(self.parts)):
            return
        shards = list(sharded_parameters(self.parts))
        parameter_ids = {id(p) for _, p in shards}
        stepped_ids = {id(parameter) for parameter in stepped_tensors(optimizer)}
        if stepped_ids <= parameter_ids:
            return
        self._values_of_step().steps_on_copies = True
        unstepped = [(fqn, p) for fqn, p in shards if p.requires_grad and id(p) not in stepped_ids]
        if self._before_copies is None:
            self._before_copies = copy_all_to_host(unstepped)
        self._find_masters(optimizer, unstepped)

    def _find_masters(self, optimizer: Optimizer, unstepped: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Find the optimizer's master copies of parameters. unstepped: those that the optimizer does not step itself."""
        if not self._compares_values:
            return
        parameter_ids = {id(p) for _, p in sharded_parameters(self.parts)}
        copies = [stepped for stepped in stepped_tensors(optimizer) if id(stepped) not in parameter_ids]
        masters = self._masters[optimizer] = {}
        for fqn, parameter in unstepped:
            master_index = _index_of_master(copies, parameter)
            if master_index is not None:
                masters[fqn] = copies.pop(master_index)

    def _copy_unstepped(self, step: StepValues) -> None:
        """Copy the trainable parameters that no optimizer stepped, and note the bytes of their masters' optimizer state."""
        trainable = ((fqn, p) for fqn, p in sharded_parameters(self.parts) if p.requires_grad)
        unstepped = [(fqn, p) for fqn, p in trainable if fqn not in step.parameters]
        step.parameters_left = copy_all_to_host(unstepped)
        for optimizer in self._masters:
            self._find_masters(optimizer, unstepped)
        states: list[Any] = []
        for optimizer in self._masters:
            states += self._states_of_masters(optimizer).values()
        step.masters_state = storage_bytes_of(state_tensors(states))

    def _states_of_masters(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of its master copies, by the fqn of the parameter that is written from each."""
        return {fqn: optimizer.state.get(master, {}) for fqn, master in self._masters.get(optimizer, {}).items()}

    def _states_by_fqn(self, optimizer: Optimizer) -> dict[str, dict[str, Any]]:
        """Return the optimizer's state of each parameter that it steps, and of each whose master it steps, by fqn."""
        own = {fqn: optimizer.state.get(p, {}) for fqn, p in self._parameters_of(optimizer)}
        return own | self._states_of_masters(optimizer)

    def _take_parameters_written_back(self) -> None:
        """Take what the next step finds for the step's update, if the trainer writes its copies into these parameters at all.

        Where they never change, the optimizer steps orphans, and nothing was updated.
        """
        steps_with_copies = [step for step in self.steps.values() if step.steps_on_copies and step.parameters_left]
        copies_by_step = [read_all(self._before_copies or {}), *(step.parameters_left for step in steps_with_copies)]
        has_change = any(_have_change(earlier, later) for earlier, later in pairwise(copies_by_step))
        if not has_change:
            return
        for step in steps_with_copies:
            step.parameters |= step.parameters_left
            step.changed_since = step.changed_since or {}  # with whatever was done to them in between

    def _values_of_step(self, step: int | None = None) -> StepValues:
        return self.steps.setdefault(self._clock.step if step is None else step, StepValues())

    def _present_gradients(self) -> dict[str, torch.Tensor]:
        """Return the present gradients by name: those of the modules' parameters, and those of shards that were noted."""
        gradients = {fqn: p.grad for fqn, p in sharded_parameters(self._whole_parts()) if p.grad is not None}
        for shards in noted_shards(self.parts):
            gradients |= dict(shards.gradients())
        return gradients

    def _whole_parts(self) -> list[nn.Module]:
        """Return the parts whose parameters are the modules' own."""
        return [part for part in self.parts if shards_of(part) is None]

    def copy_gradients(self, *, clipped_next: bool) -> None:
        """Copy the step's gradients, unless they were copied already and no backward pass followed since.

        clipped_next: clipping begins now; then gradients are no longer copied after each backward pass. Nothing is copied
        without
        model parts.
        """
        step = self._values_of_step()
        if clipped_next:
            self._backward.is_needed = False
            self._backward.drop_copies()
        has_more_backward = (
            step.passes_at_clipping is not None and step.passes_at_clipping < self._backward.ended_passes
        )
        if (step.gradients and not has_more_backward) or not self.parts:
            return
        step.passes_at_clipping = self._backward.ended_passes if clipped_next else None
        gradients = self._present_gradients()
        step.unsettled = unsettled_gradients(sharded_parameters(self._whole_parts()))
        step.gradients = copy_all_to_host(gradients.items())
        step.gradients_before = self._backward.take_copies()
        if are_readable(step.gradients) and are_readable(step.gradients_before.gradients):
            step.compare_gradients()
        module_gradients = [p.grad for _, p in named_parameters(self.parts)]  # whole ones also where shards are noted
        step.memory["gradients"] = storage_bytes_of([*module_gradients, *gradients.values()])

    def _copy_own_gradients(self, optimizer: Optimizer) -> None:
        """Copy the gradients of one optimizer, which steps inside backward.

        Only its own gradients are complete by then, and they are gone when backward ends."""
        step = self._values_of_step()
        stepped = self._parameters_of(optimizer)
        step.gradients |= copy_all_to_host((fqn, p.grad) for fqn, p in stepped if p.grad is not None)
        step.memory["gradients"] = max(step.memory.get("gradients", 0), storage_bytes_of(p.grad for _, p in stepped))

    def before_optimizer(self, optimizer: Optimizer) -> None:
        """Copy the gradients and note the learning rate that an optimizer is about to step with."""
        if self._clock.phase() == "backward":
            self._copy_own_gradients(optimizer)
        else:
            self.copy_gradients(clipped_next=False)
        self._note_steps_on_copies(optimizer)
        self._copy_resumed_state(optimizer)
        if "lr" in optimizer.param_groups[0]:  # torchtitan's containers of optimizers have none
            lr = optimizer.param_groups[0]["lr"]  # a tensor for those that are compiled
            self._learning_rates[optimizer] = copy_to_host(lr) if torch.is_tensor(lr) else float(lr)
        self._step_at_begin[optimizer] = self._clock.step

    def after_optimizer(self, optimizer: Optimizer) -> None:
        """Copy the parameters that an optimizer has stepped, and the frozen ones; note the bytes that are held.

        A model part whose shards were noted is left out: `copy_update` copies it."""
        self.optimizers[optimizer] = None
        # A closure given to step() trains inside of it: only now is it known which step this was.
        if optimizer in self._learning_rates:
            self._values_of_step().lr = self._learning_rates.pop(optimizer)
        has_trained_inside = self._step_at_begin.pop(optimizer, self._clock.step) != self._clock.step
        if has_trained_inside and not self._values_of_step().gradients:
            self.copy_gradients(clipped_next=False)
        if any(noted_shards(self.parts)):
            return  # on vectors, of which parameters are made later: copy_update
        step = self._values_of_step()
        shards = list(sharded_parameters(self.parts))
        stepped = self._parameters_of(optimizer, shards)
        frozen = [(fqn, p) for fqn, p in shards if not p.requires_grad]  # maybe in no group
        step.parameters |= copy_all_to_host((*stepped, *frozen))
        stored_tensors = (*named_parameters(self.parts), *shards)  # whole ones beside slices, where units stay gathered
        step.memory["parameters"] = storage_bytes_of(p for _, p in stored_tensors)
        states = (optimizer.state.get(parameter, {}) for _, parameter in stepped)
        state_bytes = storage_bytes_of(state_tensors(states))
        step.memory["optimizer_state"] = step.memory.get("optimizer_state", 0) + state_bytes

    def copy_shards_after_update(self, number: int | None) -> None:
        """Copy parameters and memory after a step, for model parts whose shards were noted."""
        parts = [part for part in self.parts if shards_of(part) is not None]
        if not parts:
            return
        step = self._values_of_step(number)
        if number is not None:
            step.is_copied_late = True
            step.changed_since = {}
        shards_by_fqn = dict(sharded_parameters(parts))
        step.parameters |= copy_all_to_host(shards_by_fqn.items())
        step.memory["parameters"] = storage_bytes_of(
            [*shards_by_fqn.values(), *(p for _, p in named_parameters(parts))]
        )
        step.memory["optimizer_state"] = storage_bytes_of(state_tensors(_noted_states(parts)))

    def note_changes_between_steps(self) -> None:
        """Compare the parameters with the step that just ended left them, bit for bit, before the next step begins.

        All that lie on a GPU are copied, and compared when that can be read; else only those that differ are copied."""
        finished_step = self.steps.get(self._clock.last_finished_step)
        if finished_step is not None and finished_step.steps_on_copies:
            self._copy_unstepped(finished_step)
        ended_steps = [number for number, step in self.steps.items() if step.parameters and not step.is_copied_late]
        step = self.steps[max(ended_steps)] if ended_steps else None
        if step is not None and self._compares_values:
            shards_now = ((fqn, p) for fqn, p in sharded_parameters(self.parts) if fqn in step.parameters)
            step.changed_since = copy_all_to_host(
                (fqn, p) for fqn, p in shards_now if not is_known_unchanged(p, step.parameters[fqn])
            )

    def read_copies(self) -> None:
        """Read all that was copied. Call it after waiting for the device: then the copies of a GPU's tensors are complete."""
        for step in self.steps.values():
            step.read_copies()
        self._take_parameters_written_back()
        if self.resumed is not None:
            states = {fqn: read_all(state) for fqn, state in self.resumed.optimizer_state.items()}
            self.resumed = Resumed(read_all(self.resumed.parameters), states)

    def keep_final_state(self) -> None:
        """Copy the optimizer state, when training has ended and where it is saved.

        The checks derive the state of each step from the gradients."""
        self._backward.drop_copies()
        step_numbers = [number for number, step in self.steps.items() if step.parameters or step.parameters_left]
        if not step_numbers:
            return
        last_state = self.steps[max(step_numbers)].optimizer_state
        for shards in noted_shards(self.parts):
            add_states(last_state, dict(shards.state()))
        for optimizer in self.optimizers:
            add_states(last_state, self._states_by_fqn(optimizer))


def _noted_states(parts: Iterable[nn.Module]) -> Iterator[dict[str, torch.Tensor]]:
    """Yield, for each parameter of these model parts, the optimizer state that was noted, by the optimizer's keys."""
    for shards in noted_shards(parts):
        yield from (state for _, state in shards.state())


def _index_of_master(copies: Iterable[torch.Tensor], parameter: torch.Tensor) -> int | None:
    """Return the index of the first of these copies that is a master of the parameter; None if there is none."""
    return next((index for index, copy in enumerate(copies) if is_master(copy, parameter)), None)


def _have_change(earlier: dict[str, np.ndarray], later: dict[str, np.ndarray]) -> bool:
    """Return whether any tensor that both have differs."""
    return any(not are_same_arrays(earlier[fqn], later[fqn]) for fqn in earlier.keys() & later.keys())


def add_states(all_states: dict[str, dict[str, Any]], new_states: dict[str, dict[str, Any]]) -> None:
    """Add copies of these states to all states.

    An optimizer that only contains others has no state itself: torchtitan's, whose step comes first and last."""
    all_states |= {
        fqn: copy_state_tensors(state) for fqn, state in new_states.items() if state or fqn not in all_states
    }


def is_known_unchanged(tensor: torch.Tensor, recorded: HostCopy) -> bool:
    """Return whether the tensor is known to have the recorded bits. False if comparing would wait for a device."""
    return (
        isinstance(recorded, np.ndarray)
        and not is_on_device(local_tensor_of(tensor))
        and has_same_bits(tensor, recorded)
    )


def is_master(copy: torch.Tensor, parameter: torch.Tensor) -> bool:
    """Return whether the parameter is what its own format keeps of the copy. Waits for a device."""
    local_copy = local_tensor_of(copy)
    local_parameter = local_tensor_of(parameter)
    return local_copy.shape == local_parameter.shape and torch.equal(local_copy.to(local_parameter), local_parameter)


def are_same_arrays(first: np.ndarray, second: np.ndarray) -> bool:
    """Return whether two arrays have the same shape, dtype and bits."""
    return has_same_bits(torch.from_numpy(first), second)


def has_same_bits(tensor: torch.Tensor, recorded: np.ndarray) -> bool:
    """Return whether a rank's tensor has the recorded shape, dtype and bits. bfloat16 is compared as float32."""
    tensor = local_tensor_of(tensor)
    local_tensor = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
    recorded_tensor = torch.from_numpy(recorded)
    is_same_kind = local_tensor.shape == recorded_tensor.shape and local_tensor.dtype == recorded_tensor.dtype
    if not is_same_kind:
        return False
    flat_tensor = local_tensor.reshape(-1)
    size = local_tensor.element_size()
    # eight bytes are compared at once
    is_whole_words = not (flat_tensor.numel() * size % 8 or flat_tensor.storage_offset() * size % 8)
    integer_dtype = torch.int64 if is_whole_words else torch.uint8
    integers = _as_integers(flat_tensor, integer_dtype)
    recorded_integers = _as_integers(recorded_tensor.reshape(-1), integer_dtype)
    return torch.equal(integers, recorded_integers)


def _as_integers(flat: torch.Tensor, integer_dtype: torch.dtype) -> torch.Tensor:
    """Return the bits of a flat tensor as integers.

    Trap: FSDP1's views of no or one element may have stride 0, and torch 2.14 does not view those as another type."""
    if flat.numel() < 2:
        return torch.empty(flat.shape, dtype=flat.dtype).copy_(flat).view(integer_dtype)
    return flat.view(integer_dtype)


def copy_state_tensors(state: dict[str, Any]) -> dict[str, HostCopy]:
    """Return copies of the tensors in an optimizer's state of one parameter, by its keys; other values are left out."""
    return copy_all_to_host((key, value) for key, value in state.items() if torch.is_tensor(value))


def storage_bytes_of(tensors: Iterable[torch.Tensor | None]) -> int:
    """Return the bytes of the distinct storages behind the local tensors."""
    bytes_by_address = {}
    for tensor in tensors:
        if tensor is not None:
            for dense_tensor in dense_tensors_of(tensor):
                bytes_by_address[storage_address(dense_tensor)] = dense_tensor.untyped_storage().nbytes()
    return sum(bytes_by_address.values())
