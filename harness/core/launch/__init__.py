"""Starting ranks: on this machine or through torchrun; limits, killing, logs, and the name of the culprit.

    exits = launch(Job(directory=out, world_size=4, entry="package.module:function", options={"steps": 3}))

No process survives a failed job, Ctrl-C, or the harness's own death by SIGKILL. KeyboardInterrupt leaves launch() after the
job's ranks are dead. A caller with worker threads ends their jobs with `default_server().close()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.core.evidence.records import Exit
from harness.core.launch.blame import judge
from harness.core.launch.inflight import Inflight, Issued, current, read_inflight
from harness.core.launch.job import Job, LaunchError, prepare
from harness.core.launch.leftovers import end_leftovers
from harness.core.launch.local import LocalRanks, RankServer, default_server, importable
from harness.core.launch.rank_exit import Fate
from harness.core.launch.slots import Pool, Taken, pool_of, pool_of_references, wanted_by
from harness.core.launch.standing import standing, under_way
from harness.core.launch.supervise import supervise
from harness.core.launch.torchrun import TorchrunRanks

__all__ = [
    "Exit",
    "Inflight",
    "Issued",
    "Job",
    "LaunchError",
    "Pool",
    "RankServer",
    "current",
    "default_server",
    "launch",
    "pool_of",
    "pool_of_references",
    "read_inflight",
    "standing",
]


def launch(
    job: Job,
    launcher: str = "local",
    *,
    server: RankServer | None = None,
    pool: Pool | None = None,
    began: Callable[[], object] = lambda: None,
) -> list[Exit]:
    """Run the job to its end; one Exit per rank, in order. A rank's failure is an Exit, never an exception.

    It first waits for as many slots as it has ranks, of `pool` or of this machine; `began` is called when it has them.
    LaunchError if nothing could be started; ValueError for another launcher than "local" and "torchrun".
    """
    if launcher not in ("local", "torchrun"):
        raise ValueError(f'launcher: expected "local" or "torchrun", found {launcher!r}')
    with (pool or pool_of(job.device)).taken(wanted_by(job)) as taken:
        began()
        return run(job, launcher, server, taken)


def ended_or_interrupted(job: Job, ranks: LocalRanks | TorchrunRanks) -> tuple[Fate, ...]:
    """Return how every rank ended. A KeyboardInterrupt carries lines on where the ranks are, while they still are there."""
    try:
        return supervise(job, ranks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*standing()) from None


def run(job: Job, launcher: str, server: RankServer | None, taken: Taken) -> list[Exit]:
    if launcher == "torchrun":
        ranks: LocalRanks | TorchrunRanks = TorchrunRanks(job, prepare(job), taken.environment)
    else:
        job = replace(job, env={**job.env, **taken.environment})
        modules = importable(job.preload, job.device)
        ranks = LocalRanks(server or default_server(modules), prepare(job), job.world_size, modules)
    try:
        with ranks, under_way(job, ranks):
            ranks.start()
            return judge(ended_or_interrupted(job, ranks))
    finally:
        end_leftovers(job.directory, range(job.world_size))
