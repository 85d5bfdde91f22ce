"""Tensors that are kept from step to step: of floating-point numbers, alive when a step is over, beside what is accounted.

A look walks through all objects of the process, so it is made after the first three steps and at the end only. What grows in
each of them grows for ever; caches that fill in the first steps, and buffers that are filled anew, do not. Not seen is what
only C++ holds, such as an autograd graph without a backward pass. torch itself counts functional collectives that were not
waited for; their results are kept until they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from harness.core.evidence.records import HeldTensor
from harness.core.probe.clock import Clock

STEPS_LOOKED_AT = 3  # fewer would not distinguish growth in every step from a cache that is filled once


class GrowthRecorder:
    """Bytes that are kept after the first steps and the last one. look: returns the tensors that are kept now."""

    def __init__(self, clock: Clock, look: Callable[[], tuple[HeldTensor, ...]]) -> None:
        self._clock = clock
        self._find_retained = look
        self._steps: dict[int, dict[str, int]] = {}
        self._unwaited: dict[int, int | None] = {}

    def attach(self) -> None:
        """Look between steps, after what else is done there."""
        earlier_hook = self._clock.on_between_steps

        def run_both() -> None:
            earlier_hook()
            self._note_finished_step()

        self._clock.on_between_steps = run_both

    def _note_finished_step(self) -> None:
        if 0 < self._clock.step - self._clock.start_step <= STEPS_LOOKED_AT:
            self._note_retained(self._clock.step, self._find_retained())

    def retained_bytes(self, step: int) -> dict[str, int] | None:
        """Return the bytes that were kept after a step, by "dtype shape"; None if no look was made then."""
        return self._steps.get(step)

    def unwaited_collectives_of(self, step: int) -> int | None:
        """Return how many functional collectives were not waited for after a step.

        None if no look was made then, or torch does not count them.
        """
        return self._unwaited.get(step)

    def note_after_last_step(self, step: int, tensors: Iterable[HeldTensor]) -> None:
        """Note the tensors that are kept after the last step."""
        self._note_retained(step, tensors)

    def _note_retained(self, step: int, tensors: Iterable[HeldTensor]) -> None:
        retained = bytes_by_shape_of(tensors)
        unwaited = count_unwaited_collectives()
        self._steps[step] = retained
        self._unwaited[step] = unwaited


def count_unwaited_collectives() -> int | None:
    """Count functional collectives, issued so far, that were not waited for; None if torch does not count them."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    count = getattr(c10d, "_get_work_registry_size", None)
    return None if count is None else count()


def bytes_by_shape_of(tensors: Iterable[HeldTensor]) -> dict[str, int]:
    """Return the bytes of the tensors by "dtype shape"."""
    bytes_by_shape: dict[str, int] = {}
    for tensor in tensors:
        key = f"{tensor.dtype} {list(tensor.shape)}"
        bytes_by_shape[key] = bytes_by_shape.get(key, 0) + tensor.bytes
    return bytes_by_shape
