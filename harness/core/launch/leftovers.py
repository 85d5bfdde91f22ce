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
    rank: int
    pid: int
    command: str


def mark_children(directory: Path, rank: int) -> None:
    """Have all that this process starts from now on be known as its own."""
    os.environ[MARK_VARIABLE] = f"{directory}:{rank}"


def find_leftovers(directory: Path, ranks: Iterable[int]) -> list[Leftover]:
    """Return what is left of a launch's ranks, once these ranks have ended."""
    marks = {f"{MARK_VARIABLE}={directory.absolute()}:{rank}\0".encode(): rank for rank in ranks}
    records = {str(rank_file(directory.resolve(), "inflight", rank)).encode(): rank for rank in marks.values()}
    survivors = []
    for process in Path("/proc").glob("[0-9]*"):
        rank = rank_of(process, marks, records)
        if rank is not None:
            survivors.append(Leftover(rank, int(process.name), command_of(process)))
    return sorted(survivors, key=lambda survivor: (survivor.rank, survivor.pid))


def rank_of(process: Path, marks: dict[bytes, int], records: dict[bytes, int]) -> int | None:
    """Return the rank of a process; None if it has ended, or is not ours to look into."""
    with contextlib.suppress(OSError):
        environment = (process / "environ").read_bytes() + b"\0"
        for name, rank in marks.items():
            if name in environment:
                return rank
        if b"harness.core.launch." in (process / "cmdline").read_bytes():
            memory = (process / "maps").read_bytes()
            return next((rank for name, rank in records.items() if name in memory), None)
    return None


def command_of(process: Path) -> str:
    with contextlib.suppress(OSError):
        words = (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return "forked from the rank" if "harness.core.launch." in words else words
    return "ended as we looked"


def find_outliving(directory: Path, ranks: Iterable[int]) -> list[Leftover]:
    """Return what does not end by itself soon after its rank.

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
    """Kill what is left of these ranks, and what that starts meanwhile."""
    ranks = list(ranks)
    deadline = time.monotonic() + HELPER_PATIENCE
    while (survivors := find_leftovers(directory, ranks)) and time.monotonic() < deadline:
        for survivor in survivors:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(survivor.pid, signal.SIGKILL)
        time.sleep(0.02)
