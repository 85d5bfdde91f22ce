"""Where the ranks of the jobs under way are, and who waits for whom: for a person who ends a command before its ranks end."""

from __future__ import annotations

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
    one = (job, ranks)
    _under_way.append(one)
    try:
        yield
    finally:
        _under_way.remove(one)


def standing() -> list[str]:
    """Return lines on each job under way: its ranks, alike ones together. They are alive before and after."""
    jobs = list(_under_way)
    with ThreadPoolExecutor(max(1, len(jobs))) as pool:  # a rank may take two seconds to answer
        return [line for lines in pool.map(_of_job, jobs) for line in lines]


def _of_job(one: tuple[Job, Ranks]) -> list[str]:
    job, ranks = one
    stopped = [rank for rank, pid in ranks.pids.items() if rank not in ranks.statuses and is_stopped(pid)]
    alive = [rank for rank in ranks.pids if rank not in ranks.statuses and rank not in stopped]
    issued = {rank: issued_by(job, rank) for rank in range(job.world_size)}  # before they are disturbed
    collect_stacks(job, ranks, alive)
    fates = [replace(fate(job, ranks, rank), stopped=rank in stopped, issued=issued[rank]) for rank in issued]
    return [f"{label(job)}: {text}" for text in words(fates)]


def label(job: Job) -> str:
    """Return the name of the case's folder, and of the launch in it where that is not the usual one."""
    case, launch = job.directory.parent.name, job.directory.name
    if case == ".reference":
        return "reference"
    return case if launch == "run" else f"{case}, {launch}"


def words(fates: Sequence[Fate]) -> list[str]:
    """Return what the ranks do, those that do the same in one line, and first those for which others wait."""
    waits = {fate.rank: waiting(fate, fates) for fate in fates}
    alike: dict[str, list[int]] = {}
    for one in sorted(fates, key=lambda one: bool(waits[one.rank])):
        alike.setdefault(_does(one, fates), []).append(one.rank)
    return [f"rank{'s' * (len(ranks) > 1)} {ranks_text(ranks)} {text}" for text, ranks in alike.items()]


def _does(one: Fate, fates: Sequence[Fate]) -> str:
    if one.status is not None:
        return "ended" if one.status == 0 else f"ended with exit code {one.status}"
    if one.stopped:
        return "stopped (SIGSTOP or a debugger)"
    if waits := waiting(one, fates):
        issued = next(iter(waits.values()))
        return f"in {describe(issued)}, waiting for {ranks_text(sorted(waits))}"
    if one.issued and in_collective(one):
        return f"in {describe(one.issued[-1])}, which no rank lacks"
    where = render(useful(frames(one))[:2]).replace("\n", ", called at ")
    return f"at {where}" if where else "at a place that it did not report"
