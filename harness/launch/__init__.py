"""Starting ranks: on this machine or through torchrun; limits, killing, logs, and the name of the culprit.

    exits = launch(Job(directory=out, world_size=4, entry="package.module:function", options={"steps": 3}))

No process survives: not a failed job, not Ctrl-C (KeyboardInterrupt leaves launch() after the job's ranks are dead),
not the harness's own death by SIGKILL. A caller with worker threads ends their jobs with `default_server().close()`.
"""

from __future__ import annotations

from harness.evidence.records import Exit
from harness.launch.blame import judge
from harness.launch.inflight import Inflight, Issued, current, read_inflight
from harness.launch.job import Job, LaunchError, prepare
from harness.launch.leftovers import end_leftovers
from harness.launch.local import LocalRanks, RankServer, default_server
from harness.launch.supervise import supervise
from harness.launch.torchrun import TorchrunRanks

__all__ = [
    "Exit",
    "Inflight",
    "Issued",
    "Job",
    "LaunchError",
    "RankServer",
    "current",
    "default_server",
    "launch",
    "read_inflight",
]


def launch(job: Job, launcher: str = "local", *, server: RankServer | None = None) -> list[Exit]:
    """Run the job to its end; one Exit per rank, in order. A rank's failure is an Exit, never an exception.

    LaunchError if nothing could be started; ValueError for another launcher than "local" and "torchrun".
    """
    if launcher not in ("local", "torchrun"):
        raise ValueError(f'launcher: expected "local" or "torchrun", found {launcher!r}')
    job_file = prepare(job)
    if launcher == "torchrun":
        ranks: LocalRanks | TorchrunRanks = TorchrunRanks(job, job_file)
    else:
        ranks = LocalRanks(server or default_server(job.preload), job_file, job.world_size, job.preload)
    try:
        with ranks:
            ranks.start()
            return judge(supervise(job, ranks))
    finally:
        end_leftovers(job.directory, range(job.world_size))
