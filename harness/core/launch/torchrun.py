"""Ranks started by torchrun: its rendezvous and environment; the harness's rank.py, files and limits."""

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
from harness.core.launch.process import kill_group, loopback_environment
from harness.core.launch.python_path import child_environment, module_command
from harness.core.launch.slots import slot_pool, slots_wanted_by

POLL = 0.05
EXIT_PATIENCE = 10.0  # seconds torchrun gets to end after its ranks did: other nodes may still be talking to it
RECORD_PATIENCE = {
    True: 60.0,
    False: 10.0,
}  # seconds for what ranks of other nodes left to arrive, by whether all went well


class TorchrunRanks:
    """The ranks of one job under torchrun (`supervise.Ranks`).

    Leaving the context kills torchrun, and so all that it started. torchrun and each guard (rank.main) die with their
    parent: killing torchrun is enough, whoever started late.
    """

    def __init__(self, job: Job, job_file: Path, own_environment: Mapping[str, str]) -> None:
        """own_environment: variables of this node's ranks alone."""
        self.job = job
        self.job_file = job_file
        self.local_environment = own_environment
        self.log = job_file.parent / "logs" / "torchrun.log"
        self.process: subprocess.Popen | None = None
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.hosts: dict[int, str] = {}
        self.pids: dict[int, int] = {}
        self.gone = False
        self.trouble = ""
        self.end_seen_at: float | None = None  # when torchrun was first seen to have ended

    def start(self) -> None:
        """Start torchrun in a session of its own, with its output in logs/torchrun.log; do not wait for it."""
        job = self.job
        parent = str(os.getpid())
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                module_command("harness.core.launch.agent", parent, *torchrun_arguments(job), str(self.job_file)),
                env={
                    **child_environment(),
                    **({} if job.torchrun_args else loopback_environment()),
                    **job.env,
                    **self.local_environment,
                },
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait until `is_done` returns True, at most that many seconds, reading exit records meanwhile; return whether
        it did."""
        deadline = time.monotonic() + seconds
        self.read_records()
        while not is_done() and time.monotonic() < deadline:
            time.sleep(POLL)
            self.read_records()
        return is_done()

    def read_records(self) -> None:
        """Read the exit records of ranks into `hosts`, `pids`, `statuses` and `ended`; set `gone` once torchrun ended
        for good."""
        code = self.process.poll() if self.process else None  # before we read: afterwards nothing is written
        for rank, record in self.read_open_records():
            self.hosts[rank] = record["host"]
            if record["host"] == socket.gethostname():
                self.pids[rank] = record["pid"]
            if record["status"] is not None:
                self.statuses[rank] = record["status"]
                self.ended[rank] = record["ended"]
        if code is not None and not self.may_report_more(code):
            self.gone = True
            self.trouble = f"torchrun exited with code {code}, see {self.log}"

    def may_report_more(self, code: int) -> bool:
        """Return whether exit records may still arrive after torchrun ended here with `code`: only from other nodes,
        and for a while.

        torchrun ends here when it ends on the other nodes; records of their ranks take time through a shared disk.
        """
        if not self.job.torchrun_args or not self.hosts or len(self.statuses) == self.job.world_size:
            return False  # no other node, no rank that began, or all are known
        self.end_seen_at = self.end_seen_at or time.monotonic()
        return time.monotonic() - self.end_seen_at < RECORD_PATIENCE[code == 0]

    def read_open_records(self) -> list[tuple[int, dict]]:
        """Return each rank without a status with its exit record, as far as one is written; its status may be None."""
        unknown = [rank for rank in range(self.job.world_size) if rank not in self.statuses]
        records_by_rank = ((rank, read_json(rank_file(self.job.directory, "exits", rank))) for rank in unknown)
        return [(rank, record) for rank, record in records_by_rank if record]

    def signal(self, number: int) -> None:
        """Send a signal to the living ranks of this machine."""
        for _, record in self.read_open_records():
            if record["status"] is None and record["host"] == socket.gethostname():
                signal_rank(record["pid"], number)

    def give_up(self) -> None:
        """Note why no more is reported. Leaving the context ends all that is left."""
        self.trouble = self.trouble or "torchrun's workers do not answer"

    def __enter__(self) -> TorchrunRanks:
        return self

    def __exit__(self, *failure: object) -> None:
        if self.process is None:
            return
        if failure[0] is None and not any(self.statuses.values()):
            self.wait(lambda: self.gone, EXIT_PATIENCE)
        self.signal(signal.SIGKILL)
        self.process.kill()
        self.process.wait()


def signal_rank(pid: int, number: int) -> None:
    """Send a signal to a rank; SIGKILL to its whole process group. It does nothing if the rank has died."""
    if number == signal.SIGKILL:
        return kill_group(pid)
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def run_as_node(folder: Path, seconds: float) -> int:
    """Do this node's part of a job that the harness starts on another node; wait for it and return torchrun's status.

    folder: shared by the nodes, where that harness keeps this launch. Raises LaunchError if none begins in `seconds`. A
    launch that has ended (run.json is there) is an earlier one.
    """
    job_file = folder / "job.json"
    deadline = time.monotonic() + seconds
    while not job_file.exists() or (folder / "run.json").exists():
        if time.monotonic() > deadline:
            raise LaunchError(f"{job_file}: no launch began there in {seconds:g} s: is the folder shared by the nodes?")
        time.sleep(POLL)
    job = Job(**{name: value for name, value in read_json(job_file).items() if name != "sys_path"})
    command = module_command("harness.core.launch.agent", str(os.getpid()), *torchrun_arguments(job), str(job_file))
    with slot_pool(job.device).take_slots(slots_wanted_by(job)) as taken:
        environment_here = {**child_environment(), **job.env, **taken.environment}
        return wait_for_torchrun(subprocess.Popen(command, env=environment_here, stdin=subprocess.DEVNULL), folder)


def wait_for_torchrun(torchrun: subprocess.Popen, folder: Path) -> int:
    """Wait for torchrun and return its exit status, minus SIGKILL if it had to be killed.

    It is killed EXIT_PATIENCE seconds after the first node has ended the launch: it may look for that node for ever.
    """
    try:
        while torchrun.poll() is None and not (folder / "run.json").exists():
            time.sleep(POLL)
        return torchrun.wait(EXIT_PATIENCE)
    except subprocess.TimeoutExpired:
        return -signal.SIGKILL
    finally:
        torchrun.kill()
        torchrun.wait()


def torchrun_arguments(job: Job) -> list[str]:
    """Return torchrun's arguments for a job, up to the module that each worker runs; the job's file must follow.

    Workers run Python without torchrun's own -m, which would have the current folder on its path.
    """
    standalone = ("--standalone", "--nproc-per-node", str(job.world_size))
    logs = str(Path(job.directory) / "logs" / "torchrun")  # else it litters the temporary directory
    ranks = module_command(
        "harness.core.launch.rank"
    )  # torchrun's own `python -m` would have the current folder on its path
    return ["--log-dir", logs, *(job.torchrun_args or standalone), "--no-python", *ranks]
