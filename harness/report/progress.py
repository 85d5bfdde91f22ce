"""What a person sees while cases or faults run: on a terminal one line that changes, elsewhere a line for each that ended."""

from __future__ import annotations

import shutil
import time
from collections.abc import Mapping
from typing import TextIO

from harness.evidence.text import visible
from harness.report.output import say, write

INTERVAL = 0.5  # seconds between two drawings of the line


class Progress:
    """started() may be called by any thread, the rest by one. weights: by name, what each takes beside the others."""

    def __init__(self, weights: Mapping[str, float], stream: TextIO) -> None:
        self.stream, self.terminal = stream, bool(stream and stream.isatty())
        self.began = time.monotonic()
        self.weights = weights
        self.running: list[str] = []
        self.done: list[str] = []

    def started(self, name: str) -> None:
        self.running.append(name)

    def finished(self, name: str, outcome: str, seconds: float) -> None:
        self.running.remove(name)
        self.done.append(name)
        if not self.terminal:
            say(f"{self.count()}  {outcome:<8} {name}  {seconds:.1f} s", to=self.stream)

    def draw(self) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            write("\r" + visible(self.line())[:width].ljust(width), self.stream)

    def clear(self) -> None:
        if self.terminal:
            write("\r\033[K", self.stream)

    def line(self) -> str:
        return f"{self.count()}  {self.elapsed():.0f} s{self.left()}  running: {', '.join(self.running)}"

    def count(self) -> str:
        return f"{len(self.done):>{len(str(len(self.weights)))}} of {len(self.weights)}"

    def left(self) -> str:
        done = sum(self.weights[name] for name in self.done)
        todo = sum(self.weights.values()) - done
        return f", about {self.elapsed() * todo / done:.0f} s left" if done else ""

    def elapsed(self) -> float:
        return time.monotonic() - self.began
