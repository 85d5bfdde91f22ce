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
from harness.core.launch.rank_exit import Fate, frames, in_collective, render, useful
from harness.core.launch.sequences import describe, waiting
from harness.core.launch.supervise import Ranks, collect_stacks, fate, issued_by

_under_way: list[tuple[Job, Ranks]] = []


@contextmanager
def under_way(job: Job, ranks: Ranks) -> Iterator[None]:
    job_and_ranks = (job, ranks)
    _under_way.append(job_and_ranks)
    try:
        yield
    finally:
        _under_way.remove(job_and_ranks)


def standing() -> list[str]:
    """Return lines on each job under way: its ranks, alike ones together. They are alive before and after."""
    jobs = list(_under_way)
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:  # a rank may take two seconds to answer
        return list(itertools.chain.from_iterable(pool.map(_of_job, jobs)))


def _of_job(job_and_ranks: tuple[Job, Ranks]) -> list[str]:
    job, ranks = job_and_ranks
    stopped = [rank for rank, pid in ranks.pids.items() if rank not in ranks.statuses and is_stopped(pid)]
    alive = [rank for rank in ranks.pids if rank not in ranks.statuses and rank not in stopped]
    issued = {rank: issued_by(job, rank) for rank in range(job.world_size)}  # before they are disturbed
    collect_stacks(job, ranks, alive)
    fates = [replace(fate(job, ranks, rank), stopped=rank in stopped, issued=issued[rank]) for rank in issued]
    return [f"{label(job)}: {text}" for text in words(fates)]


def label(job: Job) -> str:
    """Return the name of the case's folder, and of the launch in it where that is not the usual one."""
    case = job.directory.parent.name
    launch = job.directory.name
    if case == ".reference":
        return "reference"
    return case if launch == "run" else f"{case}, {launch}"


def words(fates: Sequence[Fate]) -> list[str]:
    """Return what the ranks do, those that do the same in one line, and first those for which others wait."""
    waits = {fate.rank: waiting(fate, fates) for fate in fates}
    ranks_by_text: dict[str, list[int]] = {}
    for rank_fate in sorted(fates, key=lambda each: bool(waits[each.rank])):
        ranks_by_text.setdefault(_does(rank_fate, fates), []).append(rank_fate.rank)
    lines = []
    for text, ranks in ranks_by_text.items():
        noun = "ranks" if len(ranks) > 1 else "rank"
        lines.append(f"{noun} {ranks_text(ranks)} {text}")
    return lines


def _does(fate: Fate, fates: Sequence[Fate]) -> str:
    if fate.status is not None:
        return "ended" if fate.status == 0 else f"ended with exit code {fate.status}"
    if fate.stopped:
        return "stopped (SIGSTOP or a debugger)"
    if waits := waiting(fate, fates):
        issued = next(iter(waits.values()))
        return f"in {describe(issued)}, waiting for {ranks_text(sorted(waits))}"
    if fate.issued and in_collective(fate):
        return f"in {describe(fate.issued[-1])}, which no rank lacks"
    where = render(useful(frames(fate))[:2]).replace("\n", ", called at ")
    return f"at {where}" if where else "at a place that it did not report"
