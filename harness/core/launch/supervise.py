"""Wait for the ranks of a job, and when they do not end well together, see where they are and kill them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from harness.core.evidence.records import AT_LIMIT, AT_WORK, BACKGROUND
from harness.core.launch.inflight import Issued, read_inflight
from harness.core.launch.job import Job, rank_file, read_json
from harness.core.launch.leftovers import outliving
from harness.core.launch.process import is_stopped
from harness.core.launch.rank_exit import Fate

GRACE = 3.0  # seconds; when a rank dies the others raise within 20 ms
STACK_PATIENCE = 2.0  # a dump takes milliseconds; a stopped rank never answers
KILL_PATIENCE = 10.0
GLANCE = 1.0
LOG_TAIL = 4000
END_OF_LOG = 1_000_000  # bytes that are read at all
LOG_CAP = 100_000_000  # bytes of one rank


class Ranks(Protocol):
    """A job under way. statuses: exit code, or minus the signal, of the ranks that ended; ended: when, on their clock.

    pids: of the ranks of this machine. hosts: names of the machines, where there may be several.
    gone: what was to report more statuses is no more; trouble: why.
    give_up: what was to report does not; end it.
    """

    pids: dict[int, int]
    statuses: dict[int, int]
    ended: dict[int, float]
    hosts: dict[int, str]
    gone: bool
    trouble: str

    def wait(self, done: Callable[[], bool], seconds: float) -> bool: ...

    def signal(self, number: int) -> None: ...

    def give_up(self) -> None: ...


def supervise(job: Job, ranks: Ranks) -> tuple[Fate, ...]:
    """Return how every rank ended, once none is left."""

    def over() -> bool:
        return ranks.gone or len(ranks.statuses) == job.world_size

    def failed() -> bool:
        return any(ranks.statuses.values())

    deadline = time.monotonic() + job.timeout
    while not (over() or failed() or flooding(job) is not None) and (seconds_left := deadline - time.monotonic()) > 0:
        ranks.wait(lambda: over() or failed(), min(GLANCE, seconds_left))
    if failed():
        ranks.wait(over, GRACE)
    killed: dict[int, str] = {}
    stopped: list[int] = []
    issued: dict[int, tuple[Issued, ...]] = {}
    if not over():
        reason = why_kill(job, ranks)
        killed = dict.fromkeys(set(range(job.world_size)) - set(ranks.statuses), reason)
        stopped = [rank for rank in killed if rank in ranks.pids and is_stopped(ranks.pids[rank])]
        issued = {rank: issued_by(job, rank) for rank in killed}  # before they are disturbed
        collect_stacks(job, ranks, [rank for rank in killed if rank not in stopped])
        ranks.signal(signal.SIGKILL)
        if not ranks.wait(over, KILL_PATIENCE):
            ranks.give_up()
    outlived = left_by(job, ranks)
    return tuple(
        replace(
            fate(job, ranks, rank),
            killed=killed.get(rank, "")
            if ranks.statuses.get(rank) == -signal.SIGKILL
            else "",  # it may have come too late
            issued=issued[rank] if rank in issued else issued_by(job, rank),
            stopped=rank in stopped,
            left=outlived.get(rank, ()),
        )
        for rank in range(job.world_size)
    )


def issued_by(job: Job, rank: int) -> tuple[Issued, ...]:
    return tuple(read_inflight(rank_file(job.directory, "inflight", rank)))


def left_by(job: Job, ranks: Ranks) -> dict[int, tuple[str, ...]]:
    """Return the commands of the processes that outlived ranks, by rank. Only if all ranks exited by themselves: a rank that
    was killed could not end what it had."""
    ended_ranks = [rank for rank, status in ranks.statuses.items() if status == 0]
    survivors = outliving(job.directory, ended_ranks) if len(ended_ranks) == job.world_size else []
    commands: dict[int, tuple[str, ...]] = {}
    for rank in ended_ranks:
        commands[rank] = tuple(survivor.command for survivor in survivors if survivor.rank == rank)
    return commands


def why_kill(job: Job, ranks: Ranks) -> str:
    failed = sorted(rank for rank, status in ranks.statuses.items() if status)
    if (rank := flooding(job)) is not None and not failed:
        return f"killed by the harness after rank {rank} wrote more than {LOG_CAP / 1e6:g} MB into its log"
    if not failed:
        advice = f", {AT_WORK}: --timeout gives it more" if advances(job) else ""
        return f"killed by the harness {AT_LIMIT} of {job.timeout:g} s{advice}"
    first_failed = min(failed, key=lambda rank: ranks.ended[rank])
    return f"killed by the harness {GRACE:g} s after rank {first_failed} failed"


def flooding(job: Job) -> int | None:
    """Return the rank that writes without end, None if there is none.

    A rank that fills the disk takes everybody's evidence with it."""
    logs = ((rank, rank_file(job.directory, "logs", rank)) for rank in range(job.world_size))
    return next((rank for rank, log in logs if log.exists() and log.stat().st_size > LOG_CAP), None)


def advances(job: Job) -> bool:
    """Return whether any rank issues a collective with others within GLANCE seconds.

    Those of threads in the background do not count."""

    def issued_with_others(rank: int) -> list[Issued]:
        return [call for call in issued_by(job, rank) if call.phase != BACKGROUND and len(call.ranks) > 1]

    def issued_so_far() -> list[list[Issued]]:
        return [issued_with_others(rank) for rank in range(job.world_size)]

    issued_before = issued_so_far()
    time.sleep(GLANCE)
    return issued_so_far() != issued_before


def collect_stacks(job: Job, ranks: Ranks, alive: list[int]) -> None:
    """Have the living ranks dump their Python stacks; wait until all have."""
    ranks.signal(signal.SIGUSR1)
    files = [rank_file(job.directory, "stacks", rank) for rank in alive]
    deadline = time.monotonic() + STACK_PATIENCE
    while time.monotonic() < deadline and not all(dumped(file) for file in files):
        time.sleep(0.02)
    time.sleep(0.1)  # for the end of a dump that has begun


def dumped(file: Path) -> bool:
    return file.exists() and "most recent call first" in file.read_text(encoding="utf-8", errors="replace")


def fate(job: Job, ranks: Ranks, rank: int) -> Fate:
    """Return what a rank left in files and its launcher reported, as plain data."""
    status = ranks.statuses.get(rank)
    stack = rank_file(job.directory, "stacks", rank)
    log = rank_file(job.directory, "logs", rank)
    return Fate(
        rank=rank,
        status=status,
        ended=ranks.ended.get(rank, 0.0),
        failure=read_json(rank_file(job.directory, "failures", rank)),
        stack=stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else "",
        log=str(log),
        log_tail=tail_of(end_of(log)) if log.exists() else "",
        trouble=ranks.trouble,
        host=ranks.hosts.get(rank, ""),
    )


def end_of(log: Path) -> str:
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - END_OF_LOG))
        return file.read().decode(errors="replace")


def tail_of(log: str) -> str:
    """Return what a rank wrote last, without the interpreter's list of threads and modules, which follows its last words."""
    return log.partition("\nFatal Python error: ")[0][-LOG_TAIL:]
