"""The queue of launches that wait for slots, in order of arrival; small ones may pass one that waits for many.

Each has a file, its ticket, which it holds locked. So a ticket is void when its process is dead. A launch that wants
more slots than are free is passed by later ones that want less, but by OVERTAKEN_AT_MOST of them: then all others wait
until it has its slots. Without passing, a machine stands idle while one launch waits for all of it; without a limit,
that launch waits for ever.
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
    """Yield a new ticket, whose file lies locked in the folder until the context ends.

    Call it only in the gate. Raises OSError.
    """
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
    """Return the tickets of launches that came earlier and still wait, earliest first. Call it only in the gate.

    Launches whose process is dead or stopped are left out; files of dead ones are deleted.
    """
    earlier = sorted(path for path in own.path.parent.iterdir() if path.name < own.path.name)
    tickets = [_read_ticket(path) for path in earlier]
    return [other for other in tickets if other is not None and not is_stopped(other.pid)]


def _read_ticket(path: Path) -> Ticket | None:
    """Return the ticket in a file. None if its launch has its slots, or its process is dead; then the file is deleted."""
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
    """Return whether another open file holds an exclusive lock. If none does, this descriptor keeps a shared one."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    return False


def may_start(own: Ticket, free: int) -> bool:
    """Return whether a launch may take its slots now, of `free` many that are free. Call it only in the gate.

    False if too few are free, an earlier launch could start too, or one was overtaken OVERTAKEN_AT_MOST times. If True,
    the tickets of all earlier launches are rewritten: each was overtaken once more.
    """
    earlier = tickets_ahead_of(own)
    if own.wanted_slots > free:
        return False
    if any(other.wanted_slots <= free or other.times_overtaken >= OVERTAKEN_AT_MOST for other in earlier):
        return False
    for other in earlier:
        Ticket(other.path, other.pid, other.wanted_slots, other.times_overtaken + 1).write()
    return True
