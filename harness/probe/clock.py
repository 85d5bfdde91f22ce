"""Tells where in a training step this process is, without asking the trainer.

A step begins with the first forward pass, or pass of a pipeline's schedule, after an optimizer step; step 0 is everything
before, and what follows the last step. Steps of a resumed run are numbered from where it was saved. Inside autograd's
engine it is "backward" (recomputation under activation checkpointing included), inside the root module's forward
"forward", otherwise inside a pipeline's schedule "pipeline", inside an optimizer "optimizer", and everywhere else "other".
"""

from __future__ import annotations

from collections.abc import Callable

import torch


class Clock:
    """between_steps is called when a step begins, and at the end, while it is still the step before."""

    between_steps: Callable[[], None] = staticmethod(lambda: None)

    def __init__(self) -> None:
        self.start = self.step = 0
        self.forward_depth = 0
        self.in_optimizer = self.in_pipeline = False
        self._step_is_over = True

    def resume(self, step: int) -> None:
        """What comes next is step + 1. Trap: restoring an optimizer may have called its step() to make its state."""
        self.start = self.step = step

    def finish(self) -> None:
        self.between_steps()
        self.step = 0

    def where(self) -> tuple[int, str]:
        return self.step, self.phase()

    def phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:
            return "backward"
        if self.forward_depth:
            return "forward"
        if self.in_pipeline:
            return "pipeline"
        return "optimizer" if self.in_optimizer else "other"

    @property
    def is_between_steps(self) -> bool:
        """The optimizer has stepped, and no forward pass has begun a new step."""
        return self._step_is_over and self.phase() == "other"

    def enter_forward(self) -> bool:
        """Returns True if this forward pass begins a new step."""
        begins = self._step_is_over and not self.forward_depth and self.phase() != "backward"
        if begins:
            self._begin_step()
        self.forward_depth += 1
        return begins

    def _begin_step(self) -> None:
        self.between_steps()
        self.step += 1
        self._step_is_over = False

    def leave_forward(self) -> None:
        self.forward_depth -= 1

    def enter_pipeline(self, inside: bool = True) -> bool:
        """Returns whether it was inside a pass before, for the caller to restore."""
        if inside and self._step_is_over:
            self._begin_step()
        before, self.in_pipeline = self.in_pipeline, inside
        return before

    def enter_set_up(self) -> int:
        """Returns the step it interrupts, for leave_set_up. What is computed meanwhile belongs to no step."""
        before, self.step = self.step, 0
        return before

    def leave_set_up(self, before: int) -> None:
        self.step = before

    def enter_optimizer(self) -> None:
        self.in_optimizer = True

    def leave_optimizer(self) -> None:
        self.in_optimizer = False
        self._step_is_over = True
