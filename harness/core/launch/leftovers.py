"""Processes that a rank started and that outlive it, in whatever session they are. Linux only; elsewhere none is found.

What a rank executes has MARK in its first environment; what it only forks has its in-flight record in memory. So they are
known without a process of ours between, whoever their parent has become. One that clears its environment is not.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from harness.core.launch.job import rank_file

MARK_VARIABLE = "HARNESS_RANK"  # in the environment of a rank: FOLDER OF THE LAUNCH:RANK
HELPER_PATIENCE = 10.0  # seconds for helpers that see that their rank has ended (a pool's workers, a resource tracker)


@dataclass(frozen=True)
class Leftover:
    """A process that outlived the rank that started it: the rank, its pid and its command line."""

    rank: int
    pid: int
    command: str


def mark_children(directory: Path, rank: int) -> None:
    """Set the variable that marks all processes that this rank executes from now on as its own."""
    os.environ[MARK_VARIABLE] = f"{directory}:{rank}"


def find_leftovers(directory: Path, ranks: Iterable[int]) -> list[Leftover]:
    """Return the living processes that these ranks of a launch left, sorted by rank and pid. Empty if there is none.

    Call it after these ranks have ended: a rank that lives would be among them.
    """
    marks = {f"{MARK_VARIABLE}={directory.absolute()}:{rank}\0".encode(): rank for rank in ranks}
    records = {str(rank_file(directory.resolve(), "inflight", rank)).encode(): rank for rank in marks.values()}
    survivors = []
    for process in Path("/proc").glob("[0-9]*"):
        rank = starting_rank(process, marks, records)
        if rank is not None:
            survivors.append(Leftover(rank, int(process.name), command_line_of(process)))
    return sorted(survivors, key=lambda survivor: (survivor.rank, survivor.pid))


def starting_rank(process: Path, marks: dict[bytes, int], records: dict[bytes, int]) -> int | None:
    """Return the rank that started a process, given its folder in /proc.

    None if none did, it ended, or we may not read it. `marks` maps bytes of an environment to ranks; `records` maps
    paths of in-flight records, as in a process's memory map.
    """
    with contextlib.suppress(OSError):
        environment = (process / "environ").read_bytes() + b"\0"
        for name, rank in marks.items():
            if name in environment:
                return rank
        if b"harness.core.launch." in (process / "cmdline").read_bytes():
            memory = (process / "maps").read_bytes()
            return next((rank for name, rank in records.items() if name in memory), None)
    return None


def command_line_of(process: Path) -> str:
    """Return a process's command line, given its folder in /proc; a fixed phrase if it was only forked or has ended."""
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return "forked from the rank" if "harness.core.launch." in words else words
    return "ended as we looked"


def wait_for_lasting_leftovers(directory: Path, ranks: Iterable[int]) -> list[Leftover]:
    """Wait up to HELPER_PATIENCE seconds for the processes that these ranks left; return those that still live.

    It looks at least twice: a look misses a process whose parent forks it after the listing and ends before its turn.
    """
    ranks = list(ranks)
    deadline = time.monotonic() + HELPER_PATIENCE
    looks = 0
    while (survivors := find_leftovers(directory, ranks)) and (looks < 1 or time.monotonic() < deadline):
        looks += 1
        time.sleep(0.1)
    return survivors


def end_leftovers(directory: Path, ranks: Iterable[int]) -> None:
    """Kill the processes that these ranks left, and those that they start meanwhile, for at most HELPER_PATIENCE seconds."""
    ranks = list(ranks)
    deadline = time.monotonic() + HELPER_PATIENCE
    while (survivors := find_leftovers(directory, ranks)) and time.monotonic() < deadline:
        for survivor in survivors:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(survivor.pid, signal.SIGKILL)
        time.sleep(0.02)
