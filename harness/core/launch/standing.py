"""Where the ranks of the jobs under way are, and who waits for whom: for a person who ends a command before its ranks end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from harness.core.blame.calls import Issued, describe_call
from harness.core.blame.rank_exit import RankExit, frames_of, is_in_collective, stack_text, useful_frames
from harness.core.blame.waits import JobCalls
from harness.core.evidence.text import ranks_text
from harness.core.launch.job import Job
from harness.core.launch.process import is_stopped
from harness.core.launch.supervise import Ranks, collect_stacks, read_issued, read_rank_exit

_running_jobs: list[tuple[Job, Ranks]] = []


@contextmanager
def registered_job(job: Job, ranks: Ranks) -> Iterator[None]:
    job_and_ranks = (job, ranks)
    _running_jobs.append(job_and_ranks)
    try:
        yield
    finally:
        _running_jobs.remove(job_and_ranks)


def describe_running_jobs() -> list[str]:
    """Return lines on each job under way: its ranks, alike ones together. They are alive before and after."""
    jobs = list(_running_jobs)
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:  # a rank may take two seconds to answer
        return list(itertools.chain.from_iterable(pool.map(_describe_job, jobs)))


def _describe_job(job_and_ranks: tuple[Job, Ranks]) -> list[str]:
    job, ranks = job_and_ranks
    stopped = [rank for rank, pid in ranks.pids.items() if rank not in ranks.statuses and is_stopped(pid)]
    alive = [rank for rank in ranks.pids if rank not in ranks.statuses and rank not in stopped]
    issued = {rank: read_issued(job, rank) for rank in range(job.world_size)}  # before they are disturbed
    collect_stacks(job, ranks, alive)
    exits = [
        replace(read_rank_exit(job, ranks, rank), is_stopped=rank in stopped, issued=issued[rank]) for rank in issued
    ]
    return [f"{job_label(job)}: {text}" for text in describe_ranks(exits)]


def job_label(job: Job) -> str:
    """Return the name of the case's folder, and of the launch in it where that is not the usual one."""
    case = job.directory.parent.name
    launch = job.directory.name
    if case == ".reference":
        return "reference"
    return case if launch == "run" else f"{case}, {launch}"


def describe_ranks(exits: Sequence[RankExit]) -> list[str]:
    """Return what the ranks do, those that do the same in one line, and first those for which others wait."""
    waits = JobCalls(exits).waits
    ranks_by_text: dict[str, list[int]] = {}
    for rank_exit in sorted(exits, key=lambda each: bool(waits[each.rank])):
        ranks_by_text.setdefault(_describe_rank(rank_exit, waits[rank_exit.rank]), []).append(rank_exit.rank)
    lines = []
    for text, ranks in ranks_by_text.items():
        noun = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"{noun} {ranks_text(ranks)} {text}")
    return lines


def _describe_rank(rank_exit: RankExit, waits: Mapping[int, Issued]) -> str:
    """Return how a rank ended, else in which call it waits for whom, else where it is. waits: rank -> the call."""
    if rank_exit.status is not None:
        return "ended" if rank_exit.status == 0 else f"ended with exit code {rank_exit.status}"
    if rank_exit.is_stopped:
        return "stopped (SIGSTOP or a debugger)"
    if waits:
        issued = next(iter(waits.values()))
        return f"in {describe_call(issued)}, waiting for {ranks_text(sorted(waits))}"
    if rank_exit.issued and is_in_collective(rank_exit):
        return f"in {describe_call(rank_exit.issued[-1])}, which no rank lacks"
    where = stack_text(useful_frames(frames_of(rank_exit))[:2]).replace("\n", ", called at ")
    return f"at {where}" if where else "at a place that it did not report"
