"""The rank server, which has torch imported and forks every local rank: `python -m harness.core.launch.server IN OUT
MODULE..`.

One JSON value per line. In:  {"start": job, "path": job.json, "world_size": n, "modules": [..]}
                              {"signal": number, "job": job}
                         Out: {"ready": seconds}   {"job", "rank", "pid"}   {"job", "rank", "status", "ended"}
                              {"job", "error"}: some rank could not be started.
End of input, however the harness ended, kills every rank. multiprocessing's forkserver would not do: it imports the caller's
__main__ again and does not report by which signal a child died.

It runs no tensor operation, has one thread and never touches CUDA: a child forked from anything else may hang. Asking
whether there is a GPU is touching it (cudaGetDeviceCount); none of what is preloaded here does.
"""

from __future__ import annotations

import functools
import gc
import importlib
import json
import os
import select
import signal
import sys
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NoReturn

from harness.core.launch.leftovers import end_leftovers
from harness.core.launch.process import kill_group, wait_and_kill_group

PRELOAD = (
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "torch.distributed.pipelining",
    "torch.distributed.checkpoint",
    "torch.distributed.checkpoint._fsspec_filesystem",
    "torch.distributed.tensor.experimental",
    "torch.distributed.tensor.debug",
    "torch.distributed._composable.replicate",
    "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "torch.nn.parallel",
    "torch.optim",
    "torch._dynamo",
    "numpy",
    "yaml",
    "torch.distributed.checkpoint.state_dict",
    "harness.core.run.rank_main",
    "harness.core.launch.rank",
    "harness.core.probe",
    "harness.core.trainers.llama3.trainer",
    "harness.reference.train",
)


class Server:
    """A rank server in this process. requests, reports: file descriptors, maybe the same one.

    alive: whether the harness still runs, by the kernel. A process forked from the harness may hold our input open
    after its death. private: more descriptors that ranks must not keep.
    """

    def __init__(self, requests: int, reports: int, alive: Callable[[], bool], private: Iterable[int] = ()) -> None:
        self.requests = requests
        self.reports = reports
        self.is_harness_alive = alive
        self.children: dict[int, tuple[int, int]] = {}  # pid -> (job, rank)
        self.job_folders: dict[int, Path] = {}  # of jobs
        self.unread_bytes = b""
        self.death_pipe, wake = os.pipe()
        os.set_blocking(wake, False)
        self.private_descriptors = {requests, reports, self.death_pipe, wake, *private}
        signal.set_wakeup_fd(wake)
        signal.signal(signal.SIGCHLD, lambda *_: None)  # without a handler the wake-up is not written
        for number in (signal.SIGINT, signal.SIGUSR1):  # a rank too young to dump its stack must not die of being asked
            signal.signal(number, signal.SIG_IGN)

    def serve(self, ready: float) -> None:
        """Report that it is ready, then fork ranks and report their ends until the harness is gone; then kill all ranks.

        ready: seconds that importing took.
        """
        try:
            self.write_report(ready=ready)
            while self.is_harness_alive():
                readable, _, _ = select.select([self.requests, self.death_pipe], [], [], 1.0)
                if self.death_pipe in readable:
                    os.read(self.death_pipe, 4096)
                    self.reap_ranks()
                if self.requests in readable and not self.read_requests():
                    break
        except (BrokenPipeError, ConnectionResetError):  # it died while we spoke with it
            pass
        self.kill_everything()

    def kill_everything(self) -> None:
        """Kill all ranks and what they leave behind: the harness is gone, so no other process does."""
        ranks_alive = list(self.children.values())
        self.send_signal(signal.SIGKILL)
        for job, rank in ranks_alive:
            end_leftovers(self.job_folders[job], [rank])

    def read_requests(self) -> bool:
        """Handle the requests that have arrived whole, and return whether the input is still open."""
        data = os.read(self.requests, 65536)
        *lines, self.unread_bytes = (self.unread_bytes + data).split(b"\n")
        for line in lines:
            self.handle_request(json.loads(line))
        return bool(data)

    def handle_request(self, request: dict[str, Any]) -> None:
        """Signal a job's ranks, or import the job's modules and fork its ranks.

        A failing fork is reported as the job's error.
        """
        if "signal" in request:
            return self.send_signal(request["signal"], job=request["job"])
        self.job_folders[request["start"]] = Path(request["path"]).parent
        import_once(request["modules"])
        try:
            for rank in range(request["world_size"]):
                self.fork_rank(request["start"], rank, Path(request["path"]))
        except OSError as error:
            self.write_report(job=request["start"], error=f"cannot start rank {rank}: {error.strerror}")

    def fork_rank(self, job: int, rank: int, path: Path) -> None:
        """Fork one rank of a job and report its pid. `path` is the job's file. Raises OSError if the system refuses."""
        server = os.getpid()
        pid = os.fork()
        if pid == 0:
            self.become_rank(path, rank, server)
        self.children[pid] = (job, rank)
        self.write_report(job=job, rank=rank, pid=pid)

    def become_rank(self, path: Path, rank: int, server: int) -> NoReturn:
        """Be a rank in this process, which was just forked: restore signals, close private descriptors, run.

        It never returns.
        """
        try:
            from harness.core.launch.rank import run_forked

            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for fd in self.private_descriptors:
                os.close(fd)
            run_forked(path, rank, server)
        finally:
            os._exit(1)

    def reap_ranks(self) -> None:
        """Reap each rank that has ended, kill what is left of its process group, and report its status and end time."""
        while self.children and (ended_child := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)):
            job, rank = self.children.pop(ended_child.si_pid)
            self.write_report(job=job, rank=rank, status=wait_and_kill_group(ended_child.si_pid), ended=time.time())

    def send_signal(self, number: int, job: int | None = None) -> None:
        """Send a signal to the living ranks of `job`, or of all jobs.

        SIGKILL also kills the processes that the rank started.
        """
        for pid, (owner, _) in self.children.items():
            if owner == job or job is None:
                os.kill(pid, number)
                if number == signal.SIGKILL:
                    kill_group(pid)

    def write_report(self, **values: Any) -> None:
        os.write(self.reports, json.dumps(values).encode() + b"\n")


def import_preloaded(modules: Iterable[str]) -> None:
    """Import the modules that every trainer imports (PRELOAD), and these."""
    import_once((*PRELOAD, *modules))


@functools.cache
def _import(name: str) -> None:
    """Import a module, at most once; if it cannot be imported, print so to stderr."""
    try:
        importlib.import_module(name)
    except ImportError:
        print(f"harness.core.launch.server: {name} is not there", file=sys.stderr)


def import_once(modules: Iterable[str]) -> None:
    """Import modules that ranks then find imported; those that are not installed are skipped with a line on stderr.

    If something new was imported, torch's finalizers at exit are switched off and all objects are frozen. So a rank
    does not touch, and thus copy, those pages.
    """
    before = len(sys.modules)
    for name in modules:
        _import(name)
    if len(sys.modules) > before:
        for finalizer in list(getattr(weakref.finalize, "_registry", ())):
            finalizer.atexit = False  # torch dismantles its libraries of operators there
        gc.collect()
        gc.freeze()


def main(requests: int, reports: int, modules: Iterable[str]) -> None:
    """Serve the parent process, through two file descriptors, until it is gone."""
    began = time.monotonic()
    harness = os.getppid()
    server = Server(requests, reports, alive=lambda: os.getppid() == harness)
    import_preloaded(modules)
    server.serve(time.monotonic() - began)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
