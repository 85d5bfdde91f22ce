"""The place in a training step where this process is, found without asking the trainer.

A step begins with the first forward pass, or pass of a pipeline's schedule, after an optimizer step. Step 0 is everything
before, and what follows the last step. Steps of a resumed run are numbered from where it was saved. The phase is "backward"
inside autograd's engine (recomputation under activation checkpointing included), "forward" inside the root module's forward.
Elsewhere it is "pipeline" inside a pipeline's schedule, "optimizer" inside an optimizer, or else "other".

A pass that records no gradients (validation under no_grad or inference_mode, a schedule's eval) is of no step, whenever it
comes: it is "evaluation". A pass in eval mode may record them, for dropout may be wanted off in training. It trains if
backward comes to what it returned. Until then it is undecided; if that never happens it was evaluation, too.

Python code may start a thread beside the one that trains, for a checkpoint written while training goes on. What it does is of
no step: it is "background". Threads of C++, autograd's and those that run a future's callback, work for the thread that trains.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch

from harness.core.evidence.records import BACKGROUND

WAITING_MODULES = ("threading", "queue", "concurrent.futures._base")
"""Modules in which a thread waits for another one."""
BACKWARD_MODULE = "torch.autograd"
"""Module from which the thread that trains goes backward."""


@dataclass(eq=False)
class Account:
    """What one forward pass, or a whole step, is counted as. Records keep the object, since its kind may be settled later.

    step: the number of the step; 0 for none. kind: "training", "evaluation", "skipped", or "undecided" as yet.
    """

    step: int
    kind: str = "training"

    def trains_step(self, step: int) -> bool:
        return self.step == step and self.kind == "training"


def _is_python_thread(thread: int) -> bool:
    """Return whether Python code started this thread, or it is the main one."""
    return any(
        python_thread.ident == thread
        for python_thread in threading.enumerate()
        if not isinstance(python_thread, threading._DummyThread)
    )


class Clock:
    """Step and phase of this process, told by observers of forward passes, schedules and optimizers.

    `account` is where what is seen now belongs, `account_of_last_pass` where what is made of the last pass's output belongs.
    `passes` counts forward passes so far. `has_evaluated` says whether one of evaluation came since the last step began.
    """

    on_between_steps: Callable[[], None] = staticmethod(lambda: None)
    """Called when a step begins, and at the end; once more if what began the step may not have trained."""
    on_schedule_end: Callable[[], None] = staticmethod(lambda: None)  # called after a schedule's pass that trains
    on_step_begin: Callable[[], None] = staticmethod(lambda: None)  # called when a step has begun
    on_pass_begin: Callable[[], None] = staticmethod(lambda: None)
    """Called when a forward pass that records gradients begins, outside of a schedule."""

    def __init__(self) -> None:
        self.start_step = self.step = 0
        self.passes = self.forward_depth = 0
        self.in_optimizer = self.in_pipeline = self.in_schedule = self.is_reducing = False
        self.has_evaluated = False
        self._step_is_over = True
        self._step_is_certain = False
        self.account = self.account_of_last_pass = self.account_of_step = Account(0)
        self._training_thread = threading.get_ident()

    def resume_after(self, step: int) -> None:
        """Go on after this step, so that the next one is step + 1.

        Trap: restoring an optimizer may have called its step() to make its state."""
        self.start_step = self.step = step
        self.account = self.account_of_last_pass = self.account_of_step = Account(step)

    def finish(self) -> None:
        """Note that training is over: call `on_between_steps` for the last time, and go back to step 0."""
        self._run_between_steps()
        self.step = 0
        self.account = self.account_of_last_pass = self.account_of_step = Account(0)

    def step_and_phase(self) -> tuple[int, str]:
        """Return the step and phase of what this thread does now; (0, BACKGROUND) of another Python thread than the
        training one.
        """
        return (0, BACKGROUND) if self._is_in_background() else (self.account.step, self.phase())

    def _is_in_background(self) -> bool:
        thread = threading.get_ident()
        return thread != self._training_thread and torch._C._current_graph_task_id() == -1 and _is_python_thread(thread)

    def _is_in_callback(self) -> bool:
        """Return whether this thread of C++ runs a future's callback, such as a communication hook's, between forward and
        optimizer: then it works for backward.

        The callback runs in backward's own thread where the future is done already."""
        is_in_pass_or_between = self.forward_depth or self.in_pipeline or self.in_optimizer or self._step_is_over
        thread = threading.get_ident()
        return not is_in_pass_or_between and thread != self._training_thread and not _is_python_thread(thread)

    def is_training_thread_busy(self) -> bool:
        """Return whether the thread that trains is in a pass, in backward or in an optimizer's step, and does not wait for
        another thread. Other threads call this."""
        frame = sys._current_frames().get(self._training_thread)
        if frame is None or frame.f_globals.get("__name__") in WAITING_MODULES:
            return False
        return bool(self.forward_depth or self.in_optimizer or self.in_pipeline) or _is_called_from(
            frame, BACKWARD_MODULE
        )

    def phase(self) -> str:
        """Return the phase of now: backward, evaluation, forward, pipeline, optimizer or other, the first that holds."""
        if torch._C._current_graph_task_id() != -1 or self.is_reducing or self._is_in_callback():
            return "backward"
        if self.account.kind == "evaluation":
            return "evaluation"
        if self.forward_depth:
            return "forward"
        if self.in_pipeline:
            return "pipeline"
        return "optimizer" if self.in_optimizer else "other"

    @property
    def is_between_steps(self) -> bool:
        """Return whether the optimizer has stepped, and no forward pass has begun a new step."""
        return self._step_is_over and self.phase() == "other"

    # ---- forward passes

    def enter_forward(self, *, recording: bool = True, in_training_mode: bool = True) -> None:
        """Note that a model's forward is called. The outermost call begins a pass, and may begin a step.

        Called from backward (recomputation) it begins none; within a schedule, whose pass it is part of, it is only counted.
        recording: whether gradients are recorded.
        """
        is_outermost = not self.forward_depth and self.phase() != "backward"
        self.forward_depth += 1
        if is_outermost:
            self.passes += 1
        if is_outermost and not self.in_schedule:
            self._begin_pass(recording, in_training_mode)

    def _begin_pass(self, records_gradients: bool, in_training_mode: bool) -> None:
        """Open the account of a pass: of evaluation, of the step, or undecided for a pass in eval mode with gradients."""
        if not records_gradients:
            self.has_evaluated = True
            self.account = Account(self.step, "evaluation")
        else:
            self.on_pass_begin()
            self._training_thread = threading.get_ident()
            self._begin_step()
            self._step_is_certain = self._step_is_certain or in_training_mode
            self.account = self.account_of_step if in_training_mode else Account(self.step, "undecided")
        self.account_of_last_pass = self.account

    def _run_between_steps(self) -> None:
        """Call `on_between_steps`. First settle that a pass which began a step, and is undecided still, did not train."""
        self.has_evaluated = self.has_evaluated or not (self._step_is_over or self._step_is_certain)
        self.on_between_steps()

    @property
    def last_finished_step(self) -> int:
        """Return the last step that is over; 0 before the first one is."""
        return self.step - (not self._step_is_over)

    def _begin_step(self) -> None:
        """Begin a step if the last one is over: call `on_between_steps`, count it, and call `on_step_begin`.

        While no pass of the present step has surely trained, only call `on_between_steps` again.
        """
        if self._step_is_over or not self._step_is_certain:
            self._run_between_steps()
        if self._step_is_over:
            self.step += 1
            self.account_of_step = Account(self.step)
            self._step_is_over = self._step_is_certain = self.has_evaluated = False
            self.on_step_begin()

    def mark_as_training(self, account: Account) -> None:
        """Settle that an undecided pass trains: backward has come to what it returned. Nothing for other passes."""
        if account.kind == "undecided":
            account.kind = "training"
            self._step_is_certain = True

    def leave_forward(self) -> None:
        """Note that a model's forward has returned. After the outermost call, what follows is the step's."""
        self.forward_depth -= 1
        if not self.forward_depth and not self.in_schedule:
            self.account = self.account_of_step

    def skip_step(self) -> None:
        """Begin the step anew: a loss scaler leaves the optimizer's step out, so what was computed since the last step trains
        nothing. Nothing between two steps.
        """
        if not self._step_is_over:
            self.account_of_step.kind = "skipped"
            self.account = self.account_of_last_pass = self.account_of_step = Account(self.step)

    # ---- passes of a pipeline's schedule

    @contextlib.contextmanager
    def schedule_pass(self, *, training: bool) -> Iterator[None]:
        """Surround one pass of a pipeline's schedule. A pass that trains may begin a step, and ends with `on_schedule_end`."""
        old_state = self.account, self.in_pipeline, self.in_schedule
        if training:
            self._training_thread = threading.get_ident()
            self._begin_step()
            self._step_is_certain = True
            self.account = self.account_of_step
        else:
            self.has_evaluated = True
            self.account = Account(self.step, "evaluation")
        self.account_of_last_pass = self.account
        self.in_pipeline = self.in_schedule = True
        try:
            yield
        finally:
            self.account, self.in_pipeline, self.in_schedule = old_state
            self.account = self.account_of_step if old_state[0].kind == "training" else old_state[0]
        if training:
            self.on_schedule_end()

    @contextlib.contextmanager
    def loss_of_schedule(self) -> Iterator[None]:
        """Surround a schedule's loss, which is computed outside of the last stage's forward, as it is without a pipeline."""
        was_in_pipeline = self.in_pipeline
        self.in_pipeline = False
        try:
            yield
        finally:
            self.in_pipeline = was_in_pipeline

    @contextlib.contextmanager
    def reducing_gradients(self) -> Iterator[None]:
        """Surround what reduces gradients outside of autograd's engine: it is part of backward all the same."""
        was_reducing = self.is_reducing
        self.is_reducing = True
        try:
            yield
        finally:
            self.is_reducing = was_reducing

    @contextlib.contextmanager
    def outside_of_steps(self) -> Iterator[None]:
        """Surround what belongs to no step: what is computed meanwhile, and what is made of it."""
        old_accounts = self.account, self.account_of_last_pass
        self.account = self.account_of_last_pass = Account(0)
        try:
            yield
        finally:
            self.account, self.account_of_last_pass = old_accounts

    # ---- the optimizer

    def enter_optimizer(self) -> None:
        self.in_optimizer = True

    def leave_optimizer(self) -> None:
        self.in_optimizer = False
        self._step_is_over = True


def _is_called_from(frame: types.FrameType | None, module: str) -> bool:
    """Return whether this frame is one of that module's, or was called from there."""
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith(module):
            return True
        frame = frame.f_back
    return False
