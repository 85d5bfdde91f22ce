"""The progress of cases or faults that run: on a terminal one line that changes, elsewhere a line for each that ended.

A single case has a line on a terminal only.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from harness.core.evidence.text import escape_control_characters
from harness.core.report.output import print_lines, write_text_as_is

DRAWING_INTERVAL = 0.5  # seconds between two drawings of the line
CLEAR_LINE = "\r\033[K"


class Progress:
    """The progress of many named runs. note_start() may be called by any thread, all other methods by one.

    weights: by name, the time that each takes, in relation to the others.
    """

    def __init__(self, weights: Mapping[str, float], stream: TextIO) -> None:
        self.stream = stream
        self.terminal = bool(stream and stream.isatty())
        self.began = time.monotonic()
        self.weights = weights
        self.running: list[str] = []
        self.done: list[str] = []

    def note_start(self, name: str) -> None:
        self.running.append(name)

    def note_end(self, name: str, outcome: str, seconds: float) -> None:
        """Note that a run ended. Where the stream is no terminal, print a line with its outcome and seconds."""
        self.running.remove(name)
        self.done.append(name)
        if not self.terminal:
            print_lines(f"{self.done_count_text()}  {outcome:<8} {name}  {seconds:.1f} s", to=self.stream)

    def draw(self) -> None:
        if self.terminal:
            draw_line(self.status_text(), self.stream)

    def clear(self) -> None:
        if self.terminal:
            write_text_as_is(CLEAR_LINE, self.stream)

    def status_text(self) -> str:
        """Return "3 of 14 20 s, about 70 s left running: a, b", the line on a terminal."""
        seconds = f"{self.elapsed_seconds():.0f} s{self.time_left_text()}"
        return f"{self.done_count_text()}  {seconds}  running: {', '.join(self.running)}"

    def done_count_text(self) -> str:
        return f"{len(self.done):>{len(str(len(self.weights)))}} of {len(self.weights)}"

    def time_left_text(self) -> str:
        """Return ", about 70 s left", by the weights of what ended and of what remains. Empty before anything ended."""
        done = sum(self.weights[name] for name in self.done)
        todo = sum(self.weights.values()) - done
        return f", about {self.elapsed_seconds() * todo / done:.0f} s left" if done else ""

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.began


def draw_line(line: str, stream: TextIO) -> None:
    """Write a line over the last line of a terminal, cut to its width. Control characters are escaped."""
    width = shutil.get_terminal_size().columns - 1
    write_text_as_is("\r" + escape_control_characters(line)[:width].ljust(width), stream)


@contextmanager
def show_stages(name: str, stream: TextIO) -> Iterator[Callable[[str], None]]:
    """Yield a function to be called with the name of each stage as it begins.

    On a terminal a thread draws a line with that name and the seconds until the block ends, and then clears it.
    Elsewhere nothing is shown.
    """
    now = [""]  # the last one is the stage that runs
    began = time.monotonic()
    ended = threading.Event()

    def drawn() -> None:
        while not ended.wait(DRAWING_INTERVAL):
            draw_line(f"{name}  {time.monotonic() - began:.0f} s  {now[-1]}", stream)

    drawing = threading.Thread(target=drawn, daemon=True)
    if not (stream and stream.isatty()):
        yield now.append
        return
    drawing.start()
    try:
        yield now.append
    finally:
        ended.set()
        drawing.join()
        write_text_as_is(CLEAR_LINE, stream)
