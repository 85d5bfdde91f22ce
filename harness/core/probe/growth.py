"""What is kept from step to step: tensors of floating-point numbers that live on when a step is over, beside what is accounted.

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

LOOKS = 3  # fewer would not distinguish growth in every step from a cache that is filled once


class GrowthRecorder:
    """look: what is kept now."""

    def __init__(self, clock: Clock, look: Callable[[], tuple[HeldTensor, ...]]) -> None:
        self._clock, self._look = clock, look
        self._steps: dict[int, dict[str, int]] = {}
        self._unwaited: dict[int, int | None] = {}

    def attach(self) -> None:
        """Look between steps, after what else is done there."""
        others = self._clock.between_steps

        def both() -> None:
            others()
            self._step_is_over()

        self._clock.between_steps = both

    def _step_is_over(self) -> None:
        if 0 < self._clock.step - self._clock.start <= LOOKS:
            self._note(self._clock.step, self._look())

    def of_step(self, step: int) -> dict[str, int] | None:
        return self._steps.get(step)

    def unwaited(self, step: int) -> int | None:
        return self._unwaited.get(step)

    def note_last(self, step: int, held: Iterable[HeldTensor]) -> None:
        self._note(step, held)

    def _note(self, step: int, held: Iterable[HeldTensor]) -> None:
        self._steps[step], self._unwaited[step] = by_shape(held), unwaited_collectives()


def unwaited_collectives() -> int | None:
    """Count functional collectives, issued so far, that were not waited for; None if torch does not count them."""
    c10d = getattr(torch._C, "_distributed_c10d", None)
    count = getattr(c10d, "_get_work_registry_size", None)
    return None if count is None else count()


def by_shape(held: Iterable[HeldTensor]) -> dict[str, int]:
    """Bytes by "dtype shape"."""
    found: dict[str, int] = {}
    for tensor in held:
        key = f"{tensor.dtype} {list(tensor.shape)}"
        found[key] = found.get(key, 0) + tensor.bytes
    return found
