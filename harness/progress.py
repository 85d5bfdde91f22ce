"""What a person sees while cases run: on a terminal one line that changes, elsewhere a line for each finished case."""

from __future__ import annotations

import shutil
import time
from typing import TYPE_CHECKING, TextIO

from harness.case import Case

if TYPE_CHECKING:
    from harness.matrix import Outcome

INTERVAL = 0.5  # seconds between two drawings of the line


class Progress:
    """started() may be called by any thread, the rest by one. A case's weight is its number of processes."""

    def __init__(self, cases: list[Case], stream: TextIO) -> None:
        self.stream, self.terminal = stream, stream.isatty()
        self.began = time.monotonic()
        self.weights = {case.name: 1 + case.dims.world_size * case.runs for case in cases}
        self.running: list[str] = []
        self.done: list[str] = []

    def started(self, case: Case) -> None:
        self.running.append(case.name)

    def finished(self, outcome: Outcome) -> None:
        self.running.remove(outcome.case.name)
        self.done.append(outcome.case.name)
        if not self.terminal:
            print(
                f"{self.count()}  {outcome.verdict:<8} {outcome.case.name}  {outcome.seconds:.1f} s",
                file=self.stream,
                flush=True,
            )

    def draw(self) -> None:
        if self.terminal:
            width = shutil.get_terminal_size().columns - 1
            print("\r" + self.line()[:width].ljust(width), end="", file=self.stream, flush=True)

    def clear(self) -> None:
        if self.terminal:
            print("\r\033[K", end="", file=self.stream, flush=True)

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
