"""The launches that wait for slots, in the order in which they came; small ones may pass one that waits for many.

Each has a file, its ticket, which it holds locked. So a ticket is void when its process is dead. A launch that wants more slots
than are free is passed by later ones that want less, but by OVERTAKEN_AT_MOST of them: then all others wait until it has its
slots. Without passing, a machine stands idle while one launch waits for all of it; without a limit, that launch waits for ever.
"""

from __future__ import annotations

import fcntl
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from harness.core.launch.process import is_stopped

OVERTAKEN_AT_MOST = 8
"""Later launches that may start before one that waits."""
_numbers = itertools.count()


@dataclass(frozen=True)
class Ticket:
    """A launch that waits."""

    path: Path
    """Its file. Names sort in the order in which launches came."""
    pid: int
    """The process that waits."""
    wanted_slots: int
    """How many slots it waits for."""
    times_overtaken: int = 0
    """How many later launches have started before it."""

    def write(self) -> None:
        self.path.write_text(f"{self.pid} {self.wanted_slots} {self.times_overtaken}", encoding="utf-8")


@contextmanager
def hold_ticket(folder: Path, wanted: int) -> Iterator[Ticket]:
    """Keep a ticket in the folder while the launch waits. Only who holds the gate may take one. Raises OSError."""
    folder.mkdir(mode=0o700, exist_ok=True)
    name = f"{time.monotonic_ns():020d}-{os.getpid()}-{next(_numbers)}"
    own = Ticket(folder / name, os.getpid(), wanted)
    with open(own.path, "a", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        own.write()
        try:
            yield own
        finally:
            own.path.unlink(missing_ok=True)


def tickets_ahead_of(own: Ticket) -> list[Ticket]:
    """Return the tickets of launches that came before, and still wait. Only who holds the gate may ask."""
    earlier = sorted(path for path in own.path.parent.iterdir() if path.name < own.path.name)
    tickets = [_read_ticket(path) for path in earlier]
    return [other for other in tickets if other is not None and not is_stopped(other.pid)]


def _read_ticket(path: Path) -> Ticket | None:
    """Return a ticket, or None if its process is dead; then the file goes."""
    try:
        with open(path, encoding="utf-8") as file:
            if _is_locked(file.fileno()):
                pid, wanted, overtaken = map(int, file.read().split())
                if Path(f"/proc/{pid}").exists():
                    return Ticket(path, pid, wanted, overtaken)
    except FileNotFoundError:
        return None  # it has its slots
    path.unlink(missing_ok=True)
    return None


def _is_locked(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def may_start(own: Ticket, free: int) -> bool:
    """Return whether a launch may take its slots now: enough are free, and all that came before want more than that.

    Only who holds the gate may ask. If so, it is noted in their tickets that they were overtaken.
    """
    earlier = tickets_ahead_of(own)
    if own.wanted_slots > free:
        return False
    if any(other.wanted_slots <= free or other.times_overtaken >= OVERTAKEN_AT_MOST for other in earlier):
        return False
    for other in earlier:
        Ticket(other.path, other.pid, other.wanted_slots, other.times_overtaken + 1).write()
    return True
