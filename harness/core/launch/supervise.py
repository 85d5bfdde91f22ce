"""Supervision: waiting for a job's ranks, and, if they do not end well together, recording where they are and killing
them."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from harness.core.blame.calls import Issued
from harness.core.blame.rank_exit import RankExit
from harness.core.evidence.records import AT_LIMIT, AT_WORK, BACKGROUND
from harness.core.launch.inflight import read_inflight
from harness.core.launch.job import Job, rank_file, read_json
from harness.core.launch.leftovers import wait_for_lasting_leftovers
from harness.core.launch.process import is_stopped

GRACE = 3.0  # seconds; when a rank dies the others raise within 20 ms
STACK_PATIENCE = 2.0  # a dump takes milliseconds; a stopped rank never answers
KILL_PATIENCE = 10.0
WATCH_INTERVAL = 1.0
LOG_TAIL = 4000
LOG_BYTES_READ = 1_000_000  # bytes that are read at all
MAX_LOG_BYTES = 100_000_000  # bytes of one rank


class Ranks(Protocol):
    """The ranks of a job under way, as a launcher offers them.

    pids: by rank, of the ranks of this machine. statuses: by rank that ended, exit code, or minus the signal. ended: by
    rank, when, in seconds since 1970 on its machine's clock. hosts: by rank, names of the machines, where there may be
    several. gone: True once no more statuses will be reported. trouble: why; empty until then. wait: waits until `done`
    returns True, at most so many seconds, and returns whether it did. signal: to all living ranks. give_up: ends the
    launcher's process, which no longer answers.
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


def supervise(job: Job, ranks: Ranks) -> tuple[RankExit, ...]:
    """Wait until all ranks have ended, and return how, in rank order.

    When a rank fails, the others have GRACE seconds to end. After that, at the time limit, or when a log grows without
    end, stacks are dumped and the living ranks are killed.
    """

    def over() -> bool:
        return ranks.gone or len(ranks.statuses) == job.world_size

    def failed() -> bool:
        return any(ranks.statuses.values())

    deadline = time.monotonic() + job.timeout
    while (
        not (over() or failed() or rank_flooding_log(job) is not None)
        and (seconds_left := deadline - time.monotonic()) > 0
    ):
        ranks.wait(lambda: over() or failed(), min(WATCH_INTERVAL, seconds_left))
    if failed():
        ranks.wait(over, GRACE)
    killed: dict[int, str] = {}
    stopped: list[int] = []
    issued: dict[int, tuple[Issued, ...]] = {}
    if not over():
        reason = kill_reason(job, ranks)
        killed = dict.fromkeys(set(range(job.world_size)) - set(ranks.statuses), reason)
        stopped = [rank for rank in killed if rank in ranks.pids and is_stopped(ranks.pids[rank])]
        issued = {rank: read_issued(job, rank) for rank in killed}  # before they are disturbed
        collect_stacks(job, ranks, [rank for rank in killed if rank not in stopped])
        ranks.signal(signal.SIGKILL)
        if not ranks.wait(over, KILL_PATIENCE):
            ranks.give_up()
    outlived = surviving_commands(job, ranks)
    return tuple(
        replace(
            read_rank_exit(job, ranks, rank),
            kill_reason=killed.get(rank, "")
            if ranks.statuses.get(rank) == -signal.SIGKILL
            else "",  # it may have come too late
            issued=issued[rank] if rank in issued else read_issued(job, rank),
            is_stopped=rank in stopped,
            surviving_processes=outlived.get(rank, ()),
        )
        for rank in range(job.world_size)
    )


def read_issued(job: Job, rank: int) -> tuple[Issued, ...]:
    return tuple(read_inflight(rank_file(job.directory, "inflight", rank)))


def surviving_commands(job: Job, ranks: Ranks) -> dict[int, tuple[str, ...]]:
    """Return the commands of the processes that outlived their rank, by rank.

    Ranks that ended with status 0 are listed; without commands, unless all ranks ended so. A rank that was killed could
    not end its processes.
    """
    ended_ranks = [rank for rank, status in ranks.statuses.items() if status == 0]
    survivors = wait_for_lasting_leftovers(job.directory, ended_ranks) if len(ended_ranks) == job.world_size else []
    commands: dict[int, tuple[str, ...]] = {}
    for rank in ended_ranks:
        commands[rank] = tuple(survivor.command for survivor in survivors if survivor.rank == rank)
    return commands


def kill_reason(job: Job, ranks: Ranks) -> str:
    """Return the sentence why the harness kills the living ranks: a failed rank, a log that is too large, or the time limit.

    A failed rank comes first. At the time limit it waits a second, to see whether ranks still issue collectives.
    """
    failed = sorted(rank for rank, status in ranks.statuses.items() if status)
    if (rank := rank_flooding_log(job)) is not None and not failed:
        return f"killed by the harness after rank {rank} wrote more than {MAX_LOG_BYTES / 1e6:g} MB into its log"
    if not failed:
        advice = f", {AT_WORK}: --timeout gives it more" if is_advancing(job) else ""
        return f"killed by the harness {AT_LIMIT} of {job.timeout:g} s{advice}"
    first_failed = min(failed, key=lambda rank: ranks.ended[rank])
    return f"killed by the harness {GRACE:g} s after rank {first_failed} failed"


def rank_flooding_log(job: Job) -> int | None:
    """Return the lowest rank whose log is larger than MAX_LOG_BYTES, None if there is none.

    A rank that fills the disk takes everybody's evidence with it.
    """
    logs = ((rank, rank_file(job.directory, "logs", rank)) for rank in range(job.world_size))
    return next((rank for rank, log in logs if log.exists() and log.stat().st_size > MAX_LOG_BYTES), None)


def is_advancing(job: Job) -> bool:
    """Return whether any rank issues a collective with others within WATCH_INTERVAL seconds, which it waits for.

    Collectives of threads in the background do not count.
    """

    def issued_with_others(rank: int) -> list[Issued]:
        return [call for call in read_issued(job, rank) if call.phase != BACKGROUND and len(call.ranks) > 1]

    def issued_so_far() -> list[list[Issued]]:
        return [issued_with_others(rank) for rank in range(job.world_size)]

    issued_before = issued_so_far()
    time.sleep(WATCH_INTERVAL)
    return issued_so_far() != issued_before


def collect_stacks(job: Job, ranks: Ranks, alive: list[int]) -> None:
    """Have the ranks dump their Python stacks into their files; wait until all in `alive` have, at most STACK_PATIENCE
    seconds."""
    ranks.signal(signal.SIGUSR1)
    files = [rank_file(job.directory, "stacks", rank) for rank in alive]
    deadline = time.monotonic() + STACK_PATIENCE
    while time.monotonic() < deadline and not all(has_dumped(file) for file in files):
        time.sleep(0.02)
    time.sleep(0.1)  # for the end of a dump that has begun


def has_dumped(file: Path) -> bool:
    return file.exists() and "most recent call first" in file.read_text(encoding="utf-8", errors="replace")


def read_rank_exit(job: Job, ranks: Ranks, rank: int) -> RankExit:
    """Return how a rank ended, from its files and its launcher's reports. A status that was not reported is None."""
    status = ranks.statuses.get(rank)
    stack = rank_file(job.directory, "stacks", rank)
    log = rank_file(job.directory, "logs", rank)
    return RankExit(
        rank=rank,
        status=status,
        end_time=ranks.ended.get(rank, 0.0),
        failure=read_json(rank_file(job.directory, "failures", rank)),
        stack=stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else "",
        log=str(log),
        log_tail=log_tail(read_log_end(log)) if log.exists() else "",
        launcher_trouble=ranks.trouble,
        host=ranks.hosts.get(rank, ""),
    )


def read_log_end(log: Path) -> str:
    """Return the last LOG_BYTES_READ bytes of a log, as text."""
    with open(log, "rb") as file:
        file.seek(max(0, log.stat().st_size - LOG_BYTES_READ))
        return file.read().decode(errors="replace")


def log_tail(log: str) -> str:
    """Return the last LOG_TAIL characters of a log, without the interpreter's list of threads and modules after a fatal
    error."""
    return log.partition("\nFatal Python error: ")[0][-LOG_TAIL:]
