"""The place that a process came to, in a file of a page that is mapped into memory: one that is killed leaves it as well.

The first part has the last collective, the second where in a step the process is. A process that ends by itself removes it.
"""

from __future__ import annotations

import contextlib
import json
import mmap
from pathlib import Path
from typing import Any

import torch

from harness.core.evidence.recording import PAGE_BYTES, SECOND_PART_OFFSET, Reached
from harness.core.probe.backward import ENGINE_FUNCTION, BackwardObserver, observe_backward
from harness.core.probe.clock import Clock
from harness.recording.compiling import not_compiled


class Progress:
    """How far this process has come, written to a mapped file where one is open."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._page: mmap.mmap | None = None
        self._optimizers = 0
        self._collective: Any = None
        self.reached: Reached | None = None

    def install(self) -> None:
        """Report backward passes from now on. None are reported by a torch that runs them by another function."""
        if observe_backward(BackwardObserver(self._begin_backward, self._end_backward)):
            not_compiled(getattr(torch.autograd, ENGINE_FUNCTION))

    @not_compiled
    def _begin_backward(self, roots: Any, retain_graph: Any, accumulates: bool) -> bool:
        """Note that backward begins. Return False, and note nothing, before the first forward pass."""
        if self.reached is None:
            return False
        self.note_phase("backward")
        return True

    @not_compiled
    def _end_backward(self) -> None:
        self.note_phase("backward", over=True)

    def pass_begins(self) -> None:
        self._optimizers = 0  # what raised in the middle of its step has not left it
        self.note_phase(self._clock.phase())

    def pass_ended(self) -> None:
        self.note_phase(self._clock.phase(), over=True)

    def optimizer_begins(self) -> None:
        self._optimizers += 1
        self.note_phase("optimizer")

    def optimizer_ended(self) -> None:
        """Note that an optimizer's step ended. One that another optimizer steps ends within that one's step."""
        self._optimizers = max(0, self._optimizers - 1)
        self.note_phase("optimizer", over=not self._optimizers)

    def note_phase(self, phase: str, *, over: bool = False) -> None:
        """Note that a phase of the present step began, or that it is over."""
        self.reached = Reached(self._clock.step, phase, over)
        self._write(SECOND_PART_OFFSET, [self._clock.step, phase, over])

    def note_collective(self, collective: Any) -> None:
        """Note the last collective: its text, group, number in the group, those before it, and numbers of other groups."""
        self._collective = collective
        self._write(0, collective)

    def _write(self, offset: int, value: Any) -> None:
        """Write a value at an offset of the page, cut at the end of its part."""
        if self._page is not None:
            end = PAGE_BYTES if offset else SECOND_PART_OFFSET
            text = json.dumps(value).encode()[: end - offset - 1] + b"\n"
            self._page[offset : offset + len(text)] = text

    def open_page(self, record: Path, *, finished: bool) -> None:
        """Map the file beside a record, so that a process that is killed leaves it; if finished, remove it."""
        last_file = record.with_suffix(".last")
        if finished:
            with contextlib.suppress(FileNotFoundError):
                last_file.unlink()
        elif self._page is None:
            last_file.write_bytes(bytes(PAGE_BYTES))
            with open(last_file, "r+b") as file:
                self._page = mmap.mmap(file.fileno(), PAGE_BYTES)
            if self._collective is not None:
                self.note_collective(self._collective)
            if (reached := self.reached) is not None:
                self._write(SECOND_PART_OFFSET, [reached.step, reached.phase, reached.over])
