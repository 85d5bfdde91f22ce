"""All that is seen of one rank in the steps that are recorded."""

from __future__ import annotations

import functools
import os
import resource
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from harness.core.evidence.recording import Fed, RecordedStep
from harness.core.evidence.records import Group, RankEvidence, TensorEvidence, Wrapper
from harness.core.evidence.step import AfterForward, StepEvidence
from harness.core.evidence.store import without_values
from harness.core.probe import environment, structure
from harness.core.probe.clock import Account, Clock
from harness.core.probe.collectives import CollectiveRecorder
from harness.core.probe.compiler import compiler
from harness.core.probe.pipeline import PipelineRecorder
from harness.core.probe.resharding import GatheredRecorder, after_forward
from harness.core.probe.settings import settings
from harness.core.probe.structure import local, name_apart, named_parameters, sharded_parameters
from harness.core.probe.values import held_bytes
from harness.recording.digests import constant, digest, not_finite
from harness.recording.inputs import begins_of, inputs_of, tensors_in
from harness.recording.numbers import Numbers
from harness.recording.optimizers import Optimizers, gradient_bytes, parameters_of

REPLICATED = ("ddp", "replicate")
LEAST = 100
"""A hundredth of the bytes of a rank's parameters: less cannot average them."""


@dataclass
class Step:
    """What was seen of one step. What is computed on a device is read when the step is over."""

    began: float = 0.0
    at: float = 0.0
    ended: float = 0.0
    digests: dict[str, torch.Tensor] = field(default_factory=dict)
    bad: dict[str, torch.Tensor] = field(default_factory=dict)
    constant: dict[str, torch.Tensor] = field(default_factory=dict)
    fed: list[tuple[Account, list[torch.Tensor], tuple[int, ...], str]] = field(default_factory=list)
    after: list[tuple[Account, AfterForward]] = field(default_factory=list)
    settings: dict[str, set[str]] = field(default_factory=dict)
    memory: dict[str, int] = field(default_factory=dict)
    lr: float | None = None
    peak: int = 0
    ungraded: tuple[str, ...] | None = None
    read_late: bool = False
    stepped: set[int] = field(default_factory=set)
    issued: int = 0


class Seen:
    def __init__(
        self,
        clock: Clock,
        collectives: CollectiveRecorder,
        pipeline: PipelineRecorder,
        own: Callable[[], float],
        numbers: Numbers | None = None,
    ) -> None:
        self.numbers = numbers or Numbers(clock)
        self._parts: list[weakref.ref[nn.Module]] = []
        self._classes: dict[str, None] = {}
        self.left_out: list[str] = []
        self.joined: int | None = None
        self.pid = os.getpid()
        self._clock, self._collectives, self._pipeline = clock, collectives, pipeline
        self._parameters: tuple[TensorEvidence, ...] = ()
        self._steps: dict[int, Step] = {}
        self._optimizers = Optimizers()
        self._known: weakref.WeakKeyDictionary[nn.Module, bool] = weakref.WeakKeyDictionary()
        self._started = settings()
        self._layout: tuple[tuple[Group, ...], dict[str, Wrapper], tuple[str, ...]] = ((), {}, ())
        self._own = own
        self._gathered = GatheredRecorder(clock)
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
        return self._known.get(module, False)

    def attach(self, module: nn.Module) -> bool:
        """Whether its calls are passes: not those of a module of a model that is known. A loss that holds the output layer
        trains, and no parameter of it is its own."""
        if module in self._known:
            return self._known[module]
        within = {other for part in self.parts for other in part.modules()}
        if module not in within and self._only_borrows(module, within):
            self._known[module] = True
            return True
        own = self._known[module] = module not in within
        if own:
            self._name(module)
            self._add(module)
        return own

    def _only_borrows(self, module: nn.Module, within: set[nn.Module]) -> bool:
        """Parts of known models, and none of these as a whole, which a wrapper has."""
        inside = set(module.modules())
        wraps = any(part in inside for part in self.parts)
        return not wraps and all(
            each in within for each in inside if next(each.parameters(recurse=False), None) is not None
        )

    def _add(self, module: nn.Module) -> None:
        within = set(module.modules())
        for part in [part for part in self.parts if part in within]:  # it was called alone before
            self._known[part] = False
        self._parts = [ref for ref in self._parts if ref() not in within]
        self._parts.append(weakref.ref(module))
        self._classes[type(module).__name__] = None
        self.pid = os.getpid()
        known = {tensor.fqn for tensor in self._parameters}
        new = {fqn: id(p) for fqn, p in sharded_parameters([module]) if fqn not in known}
        if new and not self._is_as_it_began(without=module):
            self.left_out.append(f"{type(module).__name__} before step {self._clock.finished + 1}")
        self._parameters = tuple(_claim(fqn, p) for fqn, p in sharded_parameters(self.parts))
        self.buffers = sum(one.is_floating_point() for part in self.parts for one in part.buffers())
        self._note_contents(0, {*new.values()} if self._clock.finished else None)  # a wrapper may cut what it wraps
        if self.reads_contents:
            self.numbers.start(self.parts)

    def _is_as_it_began(self, without: nn.Module) -> bool:
        """Whether every step so far is on record, and stepped on nothing but parameters of the other models. A GAN's
        discriminator may come after the first step of its generator. Trap: ZeRO by hand steps on tensors of its own."""
        others = {id(p) for _, p in sharded_parameters(part for part in self.parts if part is not without)}
        before = [self._steps.get(number, Step()) for number in range(1, self._clock.finished + 1)]
        return all(step.stepped and step.stepped <= others for step in before)

    def _name(self, module: nn.Module) -> None:
        """Give a model other names, if an earlier one has the same: parameters of a second one begin with `model2`."""
        within, number = set(module.modules()), 1
        others = {fqn: id(p) for fqn, p in named_parameters(part for part in self.parts if part not in within)}
        while any(others.get(fqn, id(p)) != id(p) for fqn, p in named_parameters([module])):
            number += 1
            name_apart(module, f"model{number}")

    # ---- passes

    def pass_begins(self, part: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._optimizers.pass_begins()
        step = self._step()
        step.began, step.at = step.began or time.perf_counter() - self._own(), step.at or time.time()
        of_model = any(part is each for each in self.parts)  # a loss is fed by a model
        inputs = inputs_of(args, kwargs) if of_model else []
        in_training = self._clock.account.kind != "evaluation"
        if inputs and in_training and self.reads_contents and inputs[0].device.type != "meta":
            dtype = str(inputs[0].dtype).removeprefix("torch.")
            step.fed.append((self._clock.account, [*map(digest, inputs)], tuple(inputs[0].shape), dtype))
        if in_training and self.reads_contents:
            before = self._steps.get(self._clock.step - 1, Step())
            self.numbers.changed.look(self._clock.step, self.parts, {} if before.read_late else before.digests)
            begins = begins_of(args, kwargs, inputs[0]) if inputs else None
            self.numbers.pass_begins(self.parts, inputs[0] if inputs else None, begins)

    def pass_ends(self, part: nn.Module) -> None:
        if self._clock.account.kind != "evaluation":
            self._step().after.append((self._clock.account, after_forward(part, over=True)))
            self._note_settings()
            self._note_late(part)
            self.numbers.pass_ends()

    def _step(self) -> Step:
        return self._steps.setdefault(self._clock.step, Step())

    def _note_settings(self) -> None:
        for name, value in settings().items():
            self._step().settings.setdefault(name, set()).add(value)

    # ---- optimizers

    def optimizer_begins(self, optimizer: Optimizer) -> None:
        self._optimizers.begins(optimizer)
        self._note_settings()
        self._note_gradients(self._step(), optimizer)
        if self.reads_contents:
            self.numbers.gradients(self.parts, parameters_of(optimizer))

    def _note_gradients(self, step: Step, optimizer: Optimizer) -> None:
        """Note them before each optimizer: one that steps inside of backward may free its gradients before the next begins."""
        before = step.ungraded
        missing = [fqn for fqn, p in sharded_parameters(self.parts) if p.grad is None and local(p).numel()]
        step.ungraded = tuple(fqn for fqn in missing if before is None or fqn in before)
        for what, size in gradient_bytes((p for _, p in named_parameters(self.parts)), optimizer).items():
            step.memory[what] = max(size, step.memory.get(what, 0))

    def optimizer_ended(self, optimizer: Optimizer) -> None:
        """Contents are those after the outermost step: ZeRO's sends to each rank what others stepped. Trap: where an optimizer
        calls a closure, the step's first pass comes after its optimizer begins, and brings the gradients."""
        step = self._step()
        if step.ungraded is None or step.ungraded:
            self._note_gradients(step, optimizer)
        if "lr" in optimizer.param_groups[0]:
            step.lr = float(optimizer.param_groups[0]["lr"])
        if not (stepped := self._optimizers.ended(optimizer)):
            return
        self._layout = self._layout_now()  # a script may give up its model before it ends
        self._note_contents(self._clock.step, stepped)
        if self.reads_contents:
            self.numbers.stepped(self.parts, stepped, [each.state for each in self._optimizers], step.lr)
        step.read_late = not step.digests
        step.stepped, step.issued = stepped, len(self._collectives.records)
        step.memory["parameters"] = held_bytes(p for _, p in sharded_parameters(self.parts))
        states = (state for each in self._optimizers for state in each.state.values())  # Shampoo's are maps of maps
        step.memory["optimizer_state"] = held_bytes(v for state in states for _, v in tensors_in("", state) if v.dim())
        step.peak = _peak()

    def _note_contents(self, number: int, owned: set[int] | None = None) -> None:
        """Note the contents of all parameters, or of those with these ids."""
        step = self._steps.setdefault(number, Step())
        for fqn, parameter in sharded_parameters(self.parts):
            if owned is None or id(parameter) in owned:
                self._note_content(step, fqn, parameter)
                if number == 0 and fqn in step.digests:
                    step.constant[fqn] = constant(parameter)

    def _note_content(self, step: Step, fqn: str, parameter: torch.Tensor) -> None:
        if self.reads_contents and parameter.device.type != "meta":
            step.digests[fqn] = digest(parameter)
            step.bad[fqn] = not_finite(parameter)

    def _note_late(self, part: nn.Module) -> None:
        """Read a step's parameters when the next step's first forward pass ends, where optimizers step on other tensors: ZeRO
        may gather parameters in that pass. What it has freed again cannot be read."""
        before = self._steps.get(self._clock.step - 1)
        if before is None or not before.read_late:
            return
        for fqn, parameter in sharded_parameters([part]):
            if fqn not in before.digests and local(parameter).numel():
                self._note_content(before, fqn, parameter)

    def read_again(self) -> None:
        """Read parameters again that a trainer averages after the optimizer's step, as local SGD does. Sharded parameters are
        final after the optimizer's step."""
        last = self._clock.finished
        step = self._steps.get(last)
        if step is None or not step.stepped or any(not w.kind.startswith(REPLICATED) for w in self._layout[1].values()):
            return
        calls = (
            call for call in self._collectives.records[step.issued :] if (call.step, call.phase) == (last, "other")
        )
        if sum(call.bytes for call in calls if len(call.ranks) > 1) * LEAST >= step.memory["parameters"]:
            self._note_contents(last, step.stepped)

    def see_what_was_left(self) -> None:
        self._gathered.see_what_was_left(self.parts)

    def step_is_over(self) -> None:
        """Another begins."""
        last = self._clock.finished
        if last in self._steps:
            self._steps[last].ended = time.perf_counter() - self._own()
        for number in [number for number in self._pipeline.actions if number not in self._steps]:
            del self._pipeline.actions[number]

    # ---- what is left behind

    def evidence(self, rank: int, world: int) -> RankEvidence:
        groups, wrappers, _ = self._layout = self._layout_now()
        return RankEvidence(
            rank=rank,
            world_size=world,
            parameters=self._parameters,
            groups=groups,
            collectives=self._collectives.settled(),
            steps=tuple(self._step_evidence(n, step) for n, step in sorted(self._steps.items()) if n and step.memory),
            structure=wrappers,
            environment=environment(),
            compiler=compiler(),
            settings=self._started,
            after_evaluation=tuple(self._gathered.after_evaluation),
            joined=self.joined,
            own_groups=self._collectives.own.settled(),
        )

    def _layout_now(self) -> tuple[tuple[Group, ...], dict[str, Wrapper], tuple[str, ...]]:
        """What it was last, where the script has left its groups and given up its model before it ends."""
        groups, wrappers, stepped = self._layout
        owned = self._optimizers.owned()
        stepped = tuple(fqn for fqn, p in sharded_parameters(self.parts) if id(p) in owned) or stepped
        if not dist.is_initialized():
            own = self._collectives.own.settled()
            return groups, wrappers or (structure.wrappers(self.parts) if own else {}), stepped
        return structure.groups(), structure.wrappers(self.parts) or wrappers, stepped

    def _step_evidence(self, number: int, step: Step) -> StepEvidence:
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
            after_forward=tuple(after for account, after in step.after if account.kind == "training"),
            settings={name: tuple(sorted(values)) for name, values in step.settings.items()},
        )

    def steps(self) -> tuple[RecordedStep, ...]:
        return tuple(self._recorded(number, step) for number, step in sorted(self._steps.items()))

    def _recorded(self, number: int, step: Step) -> RecordedStep:
        return RecordedStep(
            step=number,
            digests=dict(zip(step.digests, _read(step.digests.values()), strict=True)),
            not_finite=_where(step.bad),
            constant=_where(step.constant),
            fed=tuple(
                Fed(first, shape, dtype, tuple(others))
                for account, digests, shape, dtype in step.fed
                for first, *others in [_read(digests)]
                if account.kind == "training" and account.step  # a pipeline calls its stages once to see shapes
            ),
            seconds=step.ended - step.began if step.ended and step.began else 0.0,
            peak=step.peak,
            ungraded=step.ungraded or (),
            began=step.at,
        )

    @property
    def optimizers(self) -> tuple[str, ...]:
        return self._optimizers.texts

    @property
    def stepped(self) -> tuple[str, ...]:
        return self._layout[2]


def _claim(fqn: str, parameter: nn.Parameter) -> TensorEvidence:
    held = local(parameter)
    kind = np.dtype(str(held.dtype).removeprefix("torch.")) if held.dtype != torch.bfloat16 else np.dtype("float32")
    return TensorEvidence(
        fqn=fqn,
        global_shape=tuple(parameter.shape),
        dtype=str(parameter.dtype).removeprefix("torch."),
        mesh=_ranks_of(parameter.device_mesh) if hasattr(parameter, "device_mesh") else None,
        placements=structure.placements(parameter),
        value=without_values(tuple(held.shape), kind.name),
    )


@functools.lru_cache(maxsize=16)
def _ranks_of(mesh: Any) -> Any:
    """The same list for all parameters on it."""
    return mesh.mesh.tolist()


def _where(told: dict[str, torch.Tensor]) -> tuple[str, ...]:
    return tuple(fqn for fqn, true in zip(told, _read(told.values()), strict=True) if true)


def _read(values: Any) -> list[Any]:
    """All at once: each single one would be waited for."""
    values = list(values)
    devices = {value.device for value in values}
    if len(devices) != 1:
        return [value.item() for value in values]
    return torch.stack(values).tolist()


def _peak() -> int:
    """Return the peak of the accelerator's allocator if there is one, else of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
