"""Observations of one rank in the steps that are recorded: its models, steps, optimizers and tensors."""

from __future__ import annotations

import itertools
import os
import resource
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from harness.core.evidence.codec import array_without_values
from harness.core.evidence.recording import Fed, RecordedStep
from harness.core.evidence.records import Group, RankEvidence, TensorEvidence, Wrapper
from harness.core.evidence.step import StepEvidence
from harness.core.probe import describe_environment, structure
from harness.core.probe.clock import Account, Clock
from harness.core.probe.collectives import CollectiveRecorder
from harness.core.probe.compiler import compiler_counts
from harness.core.probe.inputs import inputs_of, sample_begins
from harness.core.probe.optimizer_steps import state_tensors
from harness.core.probe.pipeline import PipelineRecorder
from harness.core.probe.resharding import GatheredRecorder
from harness.core.probe.settings import SettingsRecorder, read_settings
from harness.core.probe.structure import local_tensor_of, named_parameters, set_name_prefix, sharded_parameters
from harness.core.probe.values import storage_bytes_of
from harness.recording.digests import has_nonfinite, is_constant_tensor, tensor_digest
from harness.recording.numbers import NumbersRecorder
from harness.recording.optimizers import Optimizers, gradient_bytes, parameter_ids_of

REPLICATED_WRAPPERS = ("ddp", "replicate")
AVERAGED_PART = 100
"""A hundredth of the bytes of a rank's parameters: less cannot average them."""


@dataclass
class ObservedStep:
    """What was seen of one step. What is computed on a device is read when the step is over."""

    began: float = 0.0
    """When the first pass began, by perf_counter without the recorder's own time; 0 if none did."""
    wall_time: float = 0.0
    """When the first pass began, in seconds since the epoch."""
    ended: float = 0.0
    """When the step was over, on the clock of `began`; 0 if it is not."""
    digests: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> digest of its contents after the step. int64 []"""
    nonfinite: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> whether any number of it is not finite. bool []"""
    constant: dict[str, torch.Tensor] = field(default_factory=dict)
    """Parameter -> whether all its numbers are equal, before training. bool []"""
    received: list[tuple[Account, list[torch.Tensor], tuple[int, ...], str]] = field(default_factory=list)
    """For each pass: its account, digests of its inputs, and shape and dtype of the first input."""
    memory: dict[str, int] = field(default_factory=dict)
    """Kind of tensors -> bytes."""
    lr: float | None = None
    """Learning rate of the optimizer's first group."""
    peak: int = 0
    """Peak of memory, in bytes."""
    without_gradient: tuple[str, ...] | None = None
    """Parameters without a gradient before every optimizer; None if none has begun."""
    read_late: bool = False
    """Whether parameters are read in the next step, since optimizers step on other tensors."""
    stepped: set[int] = field(default_factory=set)
    """Ids of the parameters that were stepped on."""
    issued: int = 0
    """Number of collectives on record as the optimizer's step ended."""


class RankObserver:
    """What was seen of one rank: its models, steps, optimizers and tensors."""

    def __init__(
        self,
        clock: Clock,
        collectives: CollectiveRecorder,
        pipeline: PipelineRecorder,
        own: Callable[[], float],
        numbers: NumbersRecorder | None = None,
    ) -> None:
        self.numbers = numbers or NumbersRecorder(clock)
        self._parts: list[weakref.ref[nn.Module]] = []
        self._classes: dict[str, None] = {}
        self.left_out: list[str] = []
        self.joined: int | None = None
        self.pid = os.getpid()
        self._clock = clock
        self._collectives = collectives
        self._pipeline = pipeline
        self._parameters: tuple[TensorEvidence, ...] = ()
        self._steps: dict[int, ObservedStep] = {}
        self._optimizers = Optimizers()
        self._is_model: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._settings = SettingsRecorder(clock, read_settings())
        self._layout: tuple[tuple[Group, ...], dict[str, Wrapper], tuple[str, ...]] = ((), {}, ())
        self._own_seconds = own
        self._gathered = GatheredRecorder(clock, finished_only=True)
        self.buffers = 0  # of floating-point numbers
        self.reads_contents = True  # not of tensors without memory

    # ---- models. They are the trainer's: nothing here keeps one alive

    @property
    def parts(self) -> list[nn.Module]:
        return [part for ref in self._parts if (part := ref()) is not None]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self._classes)

    def is_part(self, module: nn.Module) -> bool:
        return self._is_model.get(module, False)

    def attach(self, module: nn.Module) -> bool:
        """Return whether calls of the module are passes, and attach it if so. The answer for a module stays the same.

        Calls of a module inside of a known model are none. A loss that holds the output layer trains, and no parameter of it
        is its own.
        """
        if module in self._is_model:
            return self._is_model[module]
        known_modules = set(itertools.chain.from_iterable(part.modules() for part in self.parts))
        if module not in known_modules and self._only_borrows(module, known_modules):
            self._is_model[module] = True
            return True
        is_model = self._is_model[module] = module not in known_modules
        if is_model:
            self._give_own_names(module)
            self._attach_model(module)
        return is_model

    def _only_borrows(self, module: nn.Module, known_modules: set[nn.Module]) -> bool:
        """Return whether the module has no parameters but those in modules of known models, and contains no known model.

        True for a module without any parameters. False for a wrapper, which contains a known model.
        """
        own_modules = set(module.modules())
        wraps = any(part in own_modules for part in self.parts)
        return not wraps and all(
            submodule in known_modules
            for submodule in own_modules
            if next(submodule.parameters(recurse=False), None) is not None
        )

    def _attach_model(self, module: nn.Module) -> None:
        """Attach a model: its parameters, its class, and its first contents."""
        modules = set(module.modules())
        for part in [part for part in self.parts if part in modules]:  # it was called alone before
            self._is_model[part] = False
        self._parts = [ref for ref in self._parts if ref() not in modules]
        self._parts.append(weakref.ref(module))
        self._classes[type(module).__name__] = None
        self.pid = os.getpid()
        known_fqns = {tensor.fqn for tensor in self._parameters}
        new_parameters = {
            fqn: id(parameter) for fqn, parameter in sharded_parameters([module]) if fqn not in known_fqns
        }
        if new_parameters and not self._is_as_it_began(without=module):
            self.left_out.append(f"{type(module).__name__} before step {self._clock.last_finished_step + 1}")
        self._parameters = structure.parameter_evidence(self.parts, _value_without_contents)
        buffers = itertools.chain.from_iterable(part.buffers() for part in self.parts)
        self.buffers = sum(buffer.is_floating_point() for buffer in buffers)
        self._note_contents(
            0, {*new_parameters.values()} if self._clock.last_finished_step else None
        )  # a wrapper may cut what it wraps
        if self.reads_contents:
            self.numbers.note_first_weights(self.parts)

    def _is_as_it_began(self, without: nn.Module) -> bool:
        """Return whether every step so far is on record, and stepped on nothing but parameters of the other models.

        A GAN's discriminator may come after the first step of its generator. Trap: ZeRO by hand steps on tensors of its own.
        """
        other_models = [part for part in self.parts if part is not without]
        other_parameter_ids = {id(parameter) for _, parameter in sharded_parameters(other_models)}
        earlier_steps = [
            self._steps.get(number, ObservedStep()) for number in range(1, self._clock.last_finished_step + 1)
        ]
        return all(step.stepped and step.stepped <= other_parameter_ids for step in earlier_steps)

    def _give_own_names(self, module: nn.Module) -> None:
        """Give a model other names, if an earlier one has the same: parameters of a second one begin with `model2`."""
        own_modules = set(module.modules())
        other_models = [part for part in self.parts if part not in own_modules]
        other_ids = {fqn: id(parameter) for fqn, parameter in named_parameters(other_models)}
        number = 1
        while any(other_ids.get(fqn, id(parameter)) != id(parameter) for fqn, parameter in named_parameters([module])):
            number += 1
            set_name_prefix(module, f"model{number}")

    # ---- passes

    def pass_begins(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Note when a pass begins, digests of its inputs, and which parameters changed since the last step.

        In evaluation, and while `reads_contents` is False, only the time. No inputs are noted of a module that only borrows
        parameters, such as a loss: a model feeds it. Unfinished steps of optimizers are forgotten.
        """
        self._optimizers.pass_begins()
        step = self._step()
        step.began = step.began or time.perf_counter() - self._own_seconds()
        step.wall_time = step.wall_time or time.time()
        of_model = any(part is known_part for known_part in self.parts)  # a loss is fed by a model
        inputs = inputs_of(args, kwargs) if of_model else []
        in_training = self._clock.account.kind != "evaluation"
        if inputs and in_training and self.reads_contents and inputs[0].device.type != "meta":
            dtype = str(inputs[0].dtype).removeprefix("torch.")
            step.received.append((self._clock.account, [*map(tensor_digest, inputs)], tuple(inputs[0].shape), dtype))
        if in_training and self.reads_contents:
            previous_step = self._steps.get(self._clock.step - 1, ObservedStep())
            self.numbers.changed.compare_weights(
                self._clock.step, self.parts, {} if previous_step.read_late else previous_step.digests
            )
            begins = sample_begins(args, kwargs, inputs[0]) if inputs else None
            self.numbers.pass_begins(self.parts, inputs[0] if inputs else None, begins)

    def pass_ends(self, part: nn.Module) -> None:
        """Note what is gathered as a pass ends, torch's settings, and parameters to be read late. Nothing in evaluation."""
        if self._clock.account.kind != "evaluation":
            self._gathered.note_forward_end(part)
            self._settings.note_settings()
            self._note_late_contents(part)
            self.numbers.pass_ends()

    def _step(self) -> ObservedStep:
        """Return the step that is now."""
        return self._steps.setdefault(self._clock.step, ObservedStep())

    # ---- optimizers

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        """Note torch's settings, and the gradients that an optimizer is about to step with."""
        self._optimizers.begin_step(optimizer)
        self._settings.note_settings()
        self._note_gradients(self._step(), optimizer)
        if self.reads_contents:
            self.numbers.note_gradients(self.parts, parameter_ids_of(optimizer))

    def _note_gradients(self, step: ObservedStep, optimizer: Optimizer) -> None:
        """Note them before each optimizer: one that steps inside of backward may free its gradients before the next begins."""
        earlier_ungraded = step.without_gradient
        missing = [
            fqn
            for fqn, parameter in sharded_parameters(self.parts)
            if parameter.grad is None and local_tensor_of(parameter).numel()
        ]
        step.without_gradient = tuple(fqn for fqn in missing if earlier_ungraded is None or fqn in earlier_ungraded)
        for kind, size in gradient_bytes(
            (parameter for _, parameter in named_parameters(self.parts)), optimizer
        ).items():
            step.memory[kind] = max(size, step.memory.get(kind, 0))

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """Note what an optimizer's step left: contents, state and memory, after the outermost step.

        ZeRO's outermost step sends to each rank what others stepped. Trap: where an optimizer calls a closure, the step's first
        pass comes after its optimizer begins, and brings the gradients.
        """
        step = self._step()
        if step.without_gradient is None or step.without_gradient:
            self._note_gradients(step, optimizer)
        if "lr" in optimizer.param_groups[0]:
            step.lr = float(optimizer.param_groups[0]["lr"])
        if not (stepped := self._optimizers.end_step(optimizer)):
            return
        self._layout = self._layout_now()  # a script may give up its model before it ends
        self._note_contents(self._clock.step, stepped)
        if self.reads_contents:
            self.numbers.note_step(
                self.parts, stepped, [known_optimizer.state for known_optimizer in self._optimizers], step.lr
            )
        step.read_late = not step.digests
        step.stepped = stepped
        step.issued = len(self._collectives.records)
        step.memory["parameters"] = storage_bytes_of(parameter for _, parameter in sharded_parameters(self.parts))
        states = itertools.chain.from_iterable(optimizer.state.values() for optimizer in self._optimizers)
        step.memory["optimizer_state"] = storage_bytes_of(state_tensors(states))
        step.peak = _peak_bytes()

    def _note_contents(self, number: int, owned: set[int] | None = None) -> None:
        """Note the contents of all parameters after step `number`, or only of those whose ids are `owned`.

        Of step 0 also whether all numbers of a parameter are equal. Nothing where `_note_content` notes nothing.
        """
        step = self._steps.setdefault(number, ObservedStep())
        for fqn, parameter in sharded_parameters(self.parts):
            if owned is None or id(parameter) in owned:
                self._note_content(step, fqn, parameter)
                if number == 0 and fqn in step.digests:
                    step.constant[fqn] = is_constant_tensor(parameter)

    def _note_content(self, step: ObservedStep, fqn: str, parameter: torch.Tensor) -> None:
        """Put the digest of a parameter into `step.digests`, and into `step.nonfinite` whether a number of it is not finite.

        Both stay on the device. Nothing for a meta tensor, or while `reads_contents` is False.
        """
        if self.reads_contents and parameter.device.type != "meta":
            step.digests[fqn] = tensor_digest(parameter)
            step.nonfinite[fqn] = has_nonfinite(parameter)

    def _note_late_contents(self, part: nn.Module) -> None:
        """Read a step's parameters when the next step's first forward pass ends, where optimizers step on other tensors: ZeRO
        may gather parameters in that pass. What it has freed again cannot be read."""
        previous_step = self._steps.get(self._clock.step - 1)
        if previous_step is None or not previous_step.read_late:
            return
        for fqn, parameter in sharded_parameters([part]):
            if fqn not in previous_step.digests and local_tensor_of(parameter).numel():
                self._note_content(previous_step, fqn, parameter)

    def reread_averaged_parameters(self) -> None:
        """Read parameters of the last finished step again if they were averaged after the optimizer's step, as by local SGD.

        They were if collectives after it moved at least 1 / AVERAGED_PART of the parameters' bytes. Nothing is read if that
        step is not on record, or stepped no parameters. Sharded parameters are final after the optimizer's step.
        """
        last = self._clock.last_finished_step
        step = self._steps.get(last)
        if (
            step is None
            or not step.stepped
            or any(not w.kind.startswith(REPLICATED_WRAPPERS) for w in self._layout[1].values())
        ):
            return
        calls = (
            call for call in self._collectives.records[step.issued :] if (call.step, call.phase) == (last, "other")
        )
        if sum(call.bytes for call in calls if len(call.ranks) > 1) * AVERAGED_PART >= step.memory["parameters"]:
            self._note_contents(last, step.stepped)

    def note_left_by_evaluation(self) -> None:
        """Note what evaluation before this step left gathered."""
        self._gathered.note_leftovers(self.parts)

    def close_last_step(self) -> None:
        """Note when the last step ended, as another begins. Drop the pipeline's actions of steps that are not recorded."""
        last = self._clock.last_finished_step
        if last in self._steps:
            self._steps[last].ended = time.perf_counter() - self._own_seconds()
        for number in [number for number in self._pipeline.actions if number not in self._steps]:
            del self._pipeline.actions[number]

    # ---- what is left behind

    def evidence(self, rank: int, world: int) -> RankEvidence:
        """Return the evidence of this rank, as the core's checks read it."""
        groups, wrappers, _ = self._layout = self._layout_now()
        return RankEvidence(
            rank=rank,
            world_size=world,
            parameters=self._parameters,
            groups=groups,
            collectives=self._collectives.final_records(),
            steps=tuple(self._step_evidence(n, step) for n, step in sorted(self._steps.items()) if n and step.memory),
            structure=wrappers,
            environment=describe_environment(),
            compiler=compiler_counts(),
            settings=self._settings.settings_at_start,
            after_evaluation=tuple(self._gathered.after_evaluation),
            joined=self.joined,
            own_groups=self._collectives.own_groups.final_groups(),
        )

    def _layout_now(self) -> tuple[tuple[Group, ...], dict[str, Wrapper], tuple[str, ...]]:
        """Return groups, wrappers and the parameters that optimizers step on.

        A script may leave its groups and give up its model before it ends. Then these are what they were last.
        """
        groups, wrappers, stepped = self._layout
        owned = self._optimizers.parameter_ids()
        stepped = tuple(fqn for fqn, parameter in sharded_parameters(self.parts) if id(parameter) in owned) or stepped
        if not dist.is_initialized():
            own_groups = self._collectives.own_groups.final_groups()
            return groups, wrappers or (structure.wrapper_evidence(self.parts) if own_groups else {}), stepped
        return structure.group_evidence(), structure.wrapper_evidence(self.parts) or wrappers, stepped

    def _step_evidence(self, number: int, step: ObservedStep) -> StepEvidence:
        """Return a step's evidence, as the core's checks read it."""
        return StepEvidence(
            step=number,
            microbatches=(),
            reported_loss=None,
            grad_norm=None,
            lr=step.lr,
            gradients={},
            parameters={},
            optimizer_state={},
            memory=step.memory,
            actions=tuple(self._pipeline.actions.get(number, ())),
            after_forward=self._gathered.after_forward_of(number),
            settings=self._settings.settings_of(number),
        )

    def steps(self) -> tuple[RecordedStep, ...]:
        """Return what only a recording has, of step 0 and each recorded step."""
        return tuple(self._recorded_step(number, step) for number, step in sorted(self._steps.items()))

    def _recorded_step(self, number: int, step: ObservedStep) -> RecordedStep:
        """Return what only a recording has of a step."""
        return RecordedStep(
            step=number,
            digests=dict(zip(step.digests, _read_values(step.digests.values()), strict=True)),
            not_finite=_fqns_with_flag(step.nonfinite),
            constant=_fqns_with_flag(step.constant),
            fed=tuple(_received_inputs(step)),
            seconds=step.ended - step.began if step.ended and step.began else 0.0,
            peak=step.peak,
            ungraded=step.without_gradient or (),
            began=step.wall_time,
        )

    @property
    def optimizers(self) -> tuple[str, ...]:
        return self._optimizers.settings_texts

    @property
    def stepped(self) -> tuple[str, ...]:
        return self._layout[2]


def _received_inputs(step: ObservedStep) -> Iterator[Fed]:
    """Yield the inputs of the passes that trained. A pipeline calls its stages once to see shapes; that is of step 0."""
    for account, digests, shape, dtype in step.received:
        first, *others = _read_values(digests)
        if account.kind == "training" and account.step:
            yield Fed(first, shape, dtype, tuple(others))


def _value_without_contents(parameter: torch.Tensor) -> np.ndarray:
    """Return an array of the shape and dtype of the rank's slice, whose numbers mean nothing."""
    local_tensor = local_tensor_of(parameter)
    return array_without_values(tuple(local_tensor.shape), structure.numpy_dtype(local_tensor.dtype).name)


def _fqns_with_flag(flag_by_fqn: dict[str, torch.Tensor]) -> tuple[str, ...]:
    """Return the fqns whose flag is true."""
    return tuple(fqn for fqn, is_set in zip(flag_by_fqn, _read_values(flag_by_fqn.values()), strict=True) if is_set)


def _read_values(values: Any) -> list[Any]:
    """Return the values of tensors with one element, read at once, since each single read would wait for the device."""
    values = list(values)
    devices = {value.device for value in values}
    if len(devices) != 1:
        return [value.item() for value in values]
    return torch.stack(values).tolist()


def _peak_bytes() -> int:
    """Return the peak of the accelerator's allocator if there is one, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
