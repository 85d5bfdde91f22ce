"""The launching of ranks: on this machine or through torchrun; limits, killing, logs, and the ranks to blame.

    exits = launch(Job(directory=out, world_size=4, entry="package.module:function", options={"steps": 3}))

No process survives a failed job, Ctrl-C, or the harness's own death by SIGKILL. KeyboardInterrupt leaves launch() after
the job's ranks are dead. A caller with worker threads ends their jobs with `default_server().close()`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from harness.core.blame.calls import Issued
from harness.core.blame.culprits import assign_blame
from harness.core.blame.rank_exit import RankExit
from harness.core.evidence.records import Exit
from harness.core.launch.inflight import Inflight, current_inflight, read_inflight
from harness.core.launch.job import Job, LaunchError, prepare_folder
from harness.core.launch.leftovers import end_leftovers
from harness.core.launch.local import LocalRanks, RankServer, default_server, preloadable_modules
from harness.core.launch.slots import Pool, TakenSlots, reference_slot_pool, slot_pool, slots_wanted_by
from harness.core.launch.standing import describe_running_jobs, registered_job
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
    "current_inflight",
    "default_server",
    "launch",
    "slot_pool",
    "reference_slot_pool",
    "read_inflight",
    "describe_running_jobs",
]


def launch(
    job: Job,
    launcher: str = "local",
    *,
    server: RankServer | None = None,
    pool: Pool | None = None,
    began: Callable[[], object] = lambda: None,
) -> list[Exit]:
    """Run the job to its end and return one Exit per rank, in rank order.

    A rank's failure is an Exit, never an exception. It first waits for the job's slots, mostly one for each rank here,
    of `pool` or of this machine, and then calls `began`. `server` is for the launcher "local"; None means this
    process's default server. LaunchError if nothing could be started; ValueError for another launcher than "local" and
    "torchrun".
    """
    if launcher not in ("local", "torchrun"):
        raise ValueError(f'launcher: expected "local" or "torchrun", found {launcher!r}')
    with (pool or slot_pool(job.device)).take_slots(slots_wanted_by(job)) as taken:
        began()
        return run_on_slots(job, launcher, server, taken)


def supervise_until_end(job: Job, ranks: LocalRanks | TorchrunRanks) -> tuple[RankExit, ...]:
    """Return how every rank ended, in rank order, killing those that do not end well.

    On Ctrl-C it raises KeyboardInterrupt again, with lines on where each rank is. The ranks are still alive then.
    """
    try:
        return supervise(job, ranks)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(*describe_running_jobs()) from None


def run_on_slots(job: Job, launcher: str, server: RankServer | None, taken: TakenSlots) -> list[Exit]:
    """Run the job on slots that are taken already, and return one Exit per rank, in rank order.

    It prepares the job's folder, starts the ranks, waits for them and assigns blame. Afterwards, also after an
    exception, it kills the processes that ranks left behind. Without a `server`, the launcher "local" uses this
    process's default server.
    """
    if launcher == "torchrun":
        ranks: LocalRanks | TorchrunRanks = TorchrunRanks(job, prepare_folder(job), taken.environment)
    else:
        job = replace(job, env={**job.env, **taken.environment})
        modules = preloadable_modules(job.preload, job.device)
        ranks = LocalRanks(server or default_server(modules), prepare_folder(job), job.world_size, modules)
    try:
        with ranks, registered_job(job, ranks):
            ranks.start()
            return assign_blame(supervise_until_end(job, ranks))
    finally:
        end_leftovers(job.directory, range(job.world_size))
