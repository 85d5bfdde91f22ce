"""Where the ranks of the jobs under way are, and who waits for whom: for a person who ends a command before its ranks end."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace

from harness.core.evidence.text import ranks_text
from harness.core.launch.job import Job
from harness.core.launch.process import is_stopped
from harness.core.launch.rank_exit import RankExit, frames_of, is_in_collective, stack_text, useful_frames
from harness.core.launch.sequences import calls_waited_for, describe_call
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
    fates = [
        replace(read_rank_exit(job, ranks, rank), is_stopped=rank in stopped, issued=issued[rank]) for rank in issued
    ]
    return [f"{job_label(job)}: {text}" for text in describe_ranks(fates)]


def job_label(job: Job) -> str:
    """Return the name of the case's folder, and of the launch in it where that is not the usual one."""
    case = job.directory.parent.name
    launch = job.directory.name
    if case == ".reference":
        return "reference"
    return case if launch == "run" else f"{case}, {launch}"


def describe_ranks(fates: Sequence[RankExit]) -> list[str]:
    """Return what the ranks do, those that do the same in one line, and first those for which others wait."""
    waits = {fate.rank: calls_waited_for(fate, fates) for fate in fates}
    ranks_by_text: dict[str, list[int]] = {}
    for rank_fate in sorted(fates, key=lambda each: bool(waits[each.rank])):
        ranks_by_text.setdefault(_describe_rank(rank_fate, fates), []).append(rank_fate.rank)
    lines = []
    for text, ranks in ranks_by_text.items():
        noun = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"{noun} {ranks_text(ranks)} {text}")
    return lines


def _describe_rank(fate: RankExit, fates: Sequence[RankExit]) -> str:
    if fate.status is not None:
        return "ended" if fate.status == 0 else f"ended with exit code {fate.status}"
    if fate.is_stopped:
        return "stopped (SIGSTOP or a debugger)"
    if waits := calls_waited_for(fate, fates):
        issued = next(iter(waits.values()))
        return f"in {describe_call(issued)}, waiting for {ranks_text(sorted(waits))}"
    if fate.issued and is_in_collective(fate):
        return f"in {describe_call(fate.issued[-1])}, which no rank lacks"
    where = stack_text(useful_frames(frames_of(fate))[:2]).replace("\n", ", called at ")
    return f"at {where}" if where else "at a place that it did not report"
