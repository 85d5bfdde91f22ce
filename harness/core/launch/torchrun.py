"""Ranks started by torchrun: its rendezvous and environment, our rank.py, our files, our limits."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from harness.core.launch.job import Job, LaunchError, rank_file, read_json
from harness.core.launch.process import kill_group, loopback
from harness.core.launch.python_path import environment, module_command
from harness.core.launch.slots import pool_of, wanted_by

POLL = 0.05
FAREWELL = 10.0  # seconds torchrun gets to end after its ranks did: other nodes may still be talking to it
NEWS_PATIENCE = {
    True: 60.0,
    False: 10.0,
}  # seconds for what ranks of other nodes left to arrive, by whether all went well


class TorchrunRanks:
    """The ranks of one job under torchrun (`supervise.Ranks`). Leaving the context kills torchrun, and so all it has.

    torchrun and each guard (rank.main) die with their parent: killing torchrun is enough, whoever started late.
    """

    def __init__(self, job: Job, job_file: Path, own_environment: Mapping[str, str]) -> None:
        """own_environment: variables of this node's ranks alone."""
        self.job = job
        self.job_file = job_file
        self.here = own_environment
        self.log = job_file.parent / "logs" / "torchrun.log"
        self.process: subprocess.Popen | None = None
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.hosts: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self.gone = False
        self.trouble = ""
        self.over: float | None = None  # when torchrun was first seen to have ended

    def start(self) -> None:
        job = self.job
        parent = str(os.getpid())
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                module_command("harness.core.launch.agent", parent, *arguments(job), str(self.job_file)),
                env={**environment(), **({} if job.torchrun_args else loopback()), **job.env, **self.here},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        self.look()
        while not is_done() and time.monotonic() < deadline:
            time.sleep(POLL)
            self.look()
        return is_done()

    def look(self) -> None:
        code = self.process.poll() if self.process else None  # before we read: afterwards nothing is written
        for rank, record in self.records():
            self.hosts[rank] = record["host"]
            if record["host"] == socket.gethostname():
                self.pids[rank] = record["pid"]
            if record["status"] is not None:
                self.statuses[rank] = record["status"]
                self.ended[rank] = record["ended"]
        if code is not None and not self.more_may_come(code):
            self.gone = True
            self.trouble = f"torchrun exited with code {code}, see {self.log}"

    def more_may_come(self, code: int) -> bool:
        """torchrun ends here when it ends on the other nodes; what their ranks left takes its time through a shared disk."""
        if not self.job.torchrun_args or not self.hosts or len(self.statuses) == self.job.world_size:
            return False  # no other node, no rank that began, or all are known
        self.over = self.over or time.monotonic()
        return time.monotonic() - self.over < NEWS_PATIENCE[code == 0]

    def records(self) -> list[tuple[int, dict]]:
        unknown = [rank for rank in range(self.job.world_size) if rank not in self.statuses]
        records_by_rank = ((rank, read_json(rank_file(self.job.directory, "exits", rank))) for rank in unknown)
        return [(rank, record) for rank, record in records_by_rank if record]

    def signal(self, number: int) -> None:
        """Send it to the living ranks of this machine."""
        for _, record in self.records():
            if record["status"] is None and record["host"] == socket.gethostname():
                send(record["pid"], number)

    def give_up(self) -> None:
        """Leaving the context ends all that is left."""
        self.trouble = self.trouble or "torchrun's workers do not answer"

    def __enter__(self) -> TorchrunRanks:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.process is None:
            return
        if failure[0] is None and not any(self.statuses.values()):
            self.wait(lambda: self.gone, FAREWELL)
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def send(pid: int, number: int) -> None:
    """Send a signal to a rank, which leads its process group. It may have died since its record was read."""
    if number == signal.SIGKILL:
        return kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def join(folder: Path, seconds: float) -> int:
    """Do this node's part of a job that the harness started, or is about to start, on another node; return torchrun's status.

    folder: shared by the nodes, where that harness keeps this launch. Raises LaunchError if none begins in time. A
    launch that has ended (run.json is there) is an earlier one.
    """
    job_file = folder / "job.json"
    deadline = time.monotonic() + seconds
    while not job_file.exists() or (folder / "run.json").exists():
        if time.monotonic() > deadline:
            raise LaunchError(f"{job_file}: no launch began there in {seconds:g} s: is the folder shared by the nodes?")
        time.sleep(POLL)
    job = Job(**{name: value for name, value in read_json(job_file).items() if name != "sys_path"})
    command = module_command("harness.core.launch.agent", str(os.getpid()), *arguments(job), str(job_file))
    with pool_of(job.device).taken(wanted_by(job)) as taken:
        environment_here = {**environment(), **job.env, **taken.environment}
        return ended(subprocess.Popen(command, env=environment_here, stdin=subprocess.DEVNULL), folder)


def ended(torchrun: subprocess.Popen, folder: Path) -> int:
    """Wait for torchrun and return its exit status. It is killed if the first node has ended the launch: it may look for that
    node for ever."""
    try:
        while torchrun.poll() is None and not (folder / "run.json").exists():
            time.sleep(POLL)
        return torchrun.wait(FAREWELL)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        torchrun.kill()
        torchrun.wait()


def arguments(job: Job) -> list[str]:
    standalone = ("--standalone", "--nproc-per-node", str(job.world_size))
    logs = str(Path(job.directory) / "logs" / "torchrun")  # else it litters the temporary directory
    ranks = module_command(
        "harness.core.launch.rank"
    )  # torchrun's own `python -m` would have the current folder on its path
    return ["--log-dir", logs, *(job.torchrun_args or standalone), "--no-python", *ranks]
