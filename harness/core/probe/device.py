"""Time and memory that a step took of the device: seconds, and the books of the allocator. Nothing is waited for.

On a GPU events mark two places in the current stream, and are read when all is over. The allocator counts on the host. Its
peaks are since the process began, or since the trainer last set them back: the probe does not, for a trainer may show them.
The probe's own copies are in both.
"""

from __future__ import annotations

import time
from typing import TypeAlias

import torch
from torch.optim import Optimizer

from harness.core.probe.clock import Clock

ALLOCATOR_KEYS = {
    "allocated": "allocated_bytes.all.current",
    "peak allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "peak reserved": "reserved_bytes.all.peak",
}
"""Our name -> that of torch.cuda.memory_stats."""

TimeMark: TypeAlias = float | torch.cuda.Event | None
"""Seconds of the host's clock, or an event; None while a CUDA graph is captured, in which none may be timed."""


class DeviceRecorder:
    """A step lasts from its first forward pass to the end of its last optimizer's step."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._began: dict[int, TimeMark] = {}
        self._ended: dict[int, TimeMark] = {}
        self._allocator_by_step: dict[int, dict[str, int]] = {}

    def install(self) -> None:
        self._clock.on_step_begin = self._begin

    def step_seconds(self, step: int) -> float | None:
        """Return a step's seconds. None if it was not seen to begin and end, or a CUDA graph was captured then.

        Call it after waiting for the device.
        """
        began = self._began.get(step)
        ended = self._ended.get(step)
        if isinstance(began, float) and isinstance(ended, float):
            return ended - began
        if isinstance(began, torch.cuda.Event) and isinstance(ended, torch.cuda.Event):
            return began.elapsed_time(ended) / 1000
        return None

    def allocator_of(self, step: int) -> dict[str, int] | None:
        """Return bytes of CUDA's allocator at the end of a step, by the names of ALLOCATOR_KEYS; None without a GPU."""
        return self._allocator_by_step.get(step)

    def _begin(self) -> None:
        self._began[self._clock.step] = make_time_mark()

    def after_optimizer(self, _: Optimizer) -> None:
        """Mark the time, and read the allocator's books if there is a GPU."""
        self._ended[self._clock.step] = make_time_mark()
        if torch.cuda.is_initialized():
            stats = torch.cuda.memory_stats()
            self._allocator_by_step[self._clock.step] = {
                name: stats.get(key, 0) for name, key in ALLOCATOR_KEYS.items()
            }


def make_time_mark() -> TimeMark:
    """Return the time of now: of the host's clock, or on a GPU an event in the current stream.

    None while a CUDA graph is captured.
    """
    if not torch.cuda.is_initialized():
        return time.perf_counter()
    if torch.cuda.is_current_stream_capturing():
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
