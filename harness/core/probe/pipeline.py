"""The actions that torch's pipeline stages really perform, in order, and when a pass of a schedule begins and ends.

Every schedule, whatever made it, calls these methods of its stages (torch 2.11 to 2.14); they are noted when called. A
pass of a schedule is one step to the clock: receiving comes before a rank's first forward, and still belongs to it. The
loss is computed outside of the last stage's forward, as it is without a pipeline, and loss parallel's sums with it. If
the shapes between its stages were not given, a schedule first runs them forward and backward on made-up data, which belongs
to no step. A trainer whose stages and schedules are its own has an adapter that reports the same (`note_action`,
`pass_of_schedule`).
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from harness.core.probe.clock import Clock
from harness.core.probe.own_groups import all_subclasses

_installed: list[PipelineRecorder] = []


def note_action(stage: int, kind: str, microbatch: int) -> None:
    """For the adapter of a trainer with its own stages, just before one does this. kind: "F" forward, "B" backward."""
    for recorder in _installed:
        recorder.add_action(stage, kind, microbatch)


@contextlib.contextmanager
def pass_of_schedule() -> Iterator[None]:
    """For the adapter of a trainer with its own schedule, around one pass that trains. What is sent and received in it, before
    the first forward and between passes of the model, belongs to the pass. Reducing gradients comes after it."""
    with contextlib.ExitStack() as stack:
        for recorder in _installed:
            stack.enter_context(recorder._clock.schedule_pass(training=True))
        yield


class PipelineRecorder:
    """The actions of this rank's pipeline stages, by step: stage, kind and microbatch, such as "0F2", in order.

    Kinds are F forward, B backward, I backward of inputs, W backward of weights.
    """

    def __init__(self, clock: Clock) -> None:
        self.actions: dict[int, list[str]] = {}
        self._clock = clock
        self._patched: list[tuple[Any, str, Any]] = []
        self._acting_stages: list[Any] = []

    def install(self) -> None:
        """Patch torch's stages and schedules, and take what adapters note. Only the latter if torch has no pipelines."""
        _installed.append(self)
        try:
            from torch.distributed.pipelining import schedules, stage
        except ImportError:  # a torch built without distributed
            return
        base = stage._PipelineStageBase
        self._patch_action(base, "forward_one_chunk", lambda _: "F")
        self._patch_action(
            base, "backward_one_chunk", lambda arguments: "B" if arguments.get("full_backward", True) else "I"
        )
        self._patch_action(base, "backward_weight_one_chunk", lambda _: "W")
        for kind in (schedules.PipelineScheduleSingle, schedules.PipelineScheduleMulti):
            self._patch_with_context(kind, "step", self._schedule_pass)
        self._patch_with_context(
            schedules._PipelineSchedule, "_maybe_compute_loss", lambda _: self._clock.loss_of_schedule()
        )
        if hasattr(schedules._PipelineSchedule, "_initialize_pp_stages"):  # torch 2.13
            self._patch_with_context(
                schedules._PipelineSchedule, "_initialize_pp_stages", lambda _: self._clock.outside_of_steps()
            )

    def remove(self) -> None:
        """Put torch's methods back. The actions stay."""
        if self in _installed:
            _installed.remove(self)
        for owner, name, original in reversed(self._patched):
            setattr(owner, name, original)
        self._patched = []

    def add_action(self, stage: int, kind: str, microbatch: int) -> None:
        """Add an action to its step. One of a pass that does not train, such as evaluation, is left out."""
        account = self._clock.account
        if account.kind == "training":
            self.actions.setdefault(account.step, []).append(f"{stage}{kind}{microbatch}")

    def _patch_action(self, base: type, name: str, kind: Callable[[dict[str, Any]], str]) -> None:
        """Have a method of stages note its action, written as torch writes it: stage, kind, microbatch.

        A class of stages may have a method of its own that does not reach torch's, so each is watched. One that does reach it
        is noted once.
        """
        signature = inspect.signature(getattr(base, name))
        for owner in (base, *all_subclasses(base)):
            if name in vars(owner):
                self._replace_method(owner, name, self._wrap_action(vars(owner)[name], signature, kind))

    def _wrap_action(self, original: Any, signature: inspect.Signature, kind: Callable[[dict[str, Any]], str]) -> Any:
        """Return a stage's method with its action noted. A method of the same stage that it calls notes nothing."""

        @functools.wraps(original)
        def note_and_act(stage: Any, microbatch: int, *args: Any, **kwargs: Any) -> Any:
            if stage in self._acting_stages:
                return original(stage, microbatch, *args, **kwargs)
            arguments = signature.bind(stage, microbatch, *args, **kwargs).arguments
            self.add_action(stage.stage_index, kind(arguments), microbatch)
            self._acting_stages.append(stage)
            try:
                return original(stage, microbatch, *args, **kwargs)
            finally:
                self._acting_stages.remove(stage)

        return note_and_act

    def _schedule_pass(self, schedule: Any) -> AbstractContextManager[None]:
        """Return the context of one pass of a schedule.

        A schedule's eval is its step without backward; it may record gradients that are not used."""
        is_training = torch.is_grad_enabled() and getattr(schedule, "_has_backward", True)
        return self._clock.schedule_pass(training=is_training)

    def _patch_with_context(self, owner: Any, name: str, around: Callable[[Any], AbstractContextManager[None]]) -> None:
        """Replace a method by one that runs in the context that `around` returns for the schedule."""
        original = getattr(owner, name)

        @functools.wraps(original)
        def call_in_context(schedule: Any, *args: Any, **kwargs: Any) -> Any:
            with around(schedule):
                return original(schedule, *args, **kwargs)

        self._replace_method(owner, name, call_in_context)

    def _replace_method(self, owner: Any, name: str, replacement: Any) -> None:
        self._patched.append((owner, name, getattr(owner, name)))
        setattr(owner, name, replacement)
