"""The harness's side of the rank server: it starts the server, requests ranks, and reads how they end.

Any thread may launch.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import IO, Any

from harness.core.launch.job import LaunchError
from harness.core.launch.own_server import OwnServer, ServerLink
from harness.core.launch.process import kill_group
from harness.core.launch.resident_client import connect_or_start

READY_PATIENCE = 120.0  # importing torch takes 3 s, on a cold disk a minute
MEETING_PATIENCE = 300.0  # for one that outlives commands: others may wait for it, or it is replaced
CLOSE_PATIENCE = 5.0


class LocalRanks:
    """The ranks of one job that the server forked (`supervise.Ranks`). Leaving the context kills those that live.

    `pids`, `statuses` (exit code, or minus the signal) and `ended` (seconds since 1970) are by rank. `gone` is True
    once the server ended or could not start a rank; `trouble` then says why.
    """

    def __init__(self, server: RankServer, job_file: Path, world_size: int, modules: Iterable[str] = ()) -> None:
        """modules: what the server imports first, if it has not."""
        self.server = server
        self.job_file = job_file
        self.world_size = world_size
        self.modules = tuple(modules)
        self.job_number = next(server.job_numbers)
        self.started_ranks = 0
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.hosts: dict[int, str] = {}
        self.gone = False
        self.trouble = ""

    def wait(self, is_done: Callable[[], bool], seconds: float) -> bool:
        """Wait until `is_done` returns True, at most that many seconds; return whether it did."""
        with self.server.changes:
            return self.server.changes.wait_for(is_done, seconds)

    def signal(self, number: int) -> None:
        self.server.send_request(signal=number, job=self.job_number)

    def give_up(self) -> None:
        """Kill the server, which ends all jobs that it has, and wait up to CLOSE_PATIENCE seconds until that is noted."""
        self.server.kill("it did not answer (stopped?) and was killed")
        self.wait(lambda: self.gone, CLOSE_PATIENCE)

    def handle_report(self, report: dict[str, Any]) -> None:
        """Store what the server reports of one rank: its pid, or its status and end; an error otherwise, on which no
        more is expected."""
        if "pid" in report:
            self.pids[report["rank"]] = report["pid"]
        elif "status" in report:
            self.statuses[report["rank"]] = report["status"]
            self.ended[report["rank"]] = report["ended"]
        else:
            self.gone = True
            self.trouble = report["error"]

    def start(self) -> None:
        """Wait until the server is ready and request the ranks from it, without waiting for them.

        LaunchError if it never is ready. Call it inside the context, so that an interrupt meets something that will
        clean up.
        """
        self.server.wait_until_ready()
        self.server.jobs[self.job_number] = self
        self.started_ranks = self.world_size
        self.server.send_request(
            start=self.job_number, path=str(self.job_file), world_size=self.world_size, modules=self.modules
        )

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.wait(lambda: self.gone or len(self.statuses) == self.started_ranks, CLOSE_PATIENCE)
        self.server.jobs.pop(self.job_number, None)


class RankServer:
    """A rank server, which is met or started at once, in the background; it serves many jobs, also at the same time.

    The ranks see the modules the server imported (torch, harness.reference.model) as they were then. Close it and make
    another after another version of one of these is checked out.
    """

    def __init__(
        self, modules: Iterable[str] = (), link: Callable[[Iterable[str], IO[bytes]], ServerLink] = OwnServer
    ) -> None:
        """modules: a trainer's own dependencies, imported in addition if they are installed.

        link: called with the modules and a file for the server's stderr; it returns the connection to a server.
        """
        self.modules = tuple(modules)
        self.changes = threading.Condition()
        self.jobs: dict[int, LocalRanks] = {}
        self.job_numbers = itertools.count(1)
        self.start_seconds: float | None = None  # what starting took; None until it is ready
        self.gone = False
        self.closed = False
        self.failure_text = ""
        self.status = ""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - the server holds it too
        self.link: ServerLink | None = None
        self.owner_pid = os.getpid()
        self.listener = threading.Thread(
            target=self.listen_to_reports, args=(link,), name="rank server reports", daemon=True
        )
        self.listener.start()

    @property
    def pid(self) -> int:
        """Return the server's pid. Call it once the server is ready."""
        assert self.link is not None
        return self.link.pid

    def listen_to_reports(self, make_link: Callable[[Iterable[str], IO[bytes]], ServerLink]) -> None:
        """Connect to a server, then handle its reports until it ends; it is the body of the thread `listener`.

        If the connection fails, or when the server ends, all jobs are marked as gone (note_end).
        """
        try:
            connected = make_link(self.modules, self.errors)
        except OSError as error:
            self.failure_text = str(error)
            return self.note_end(f"the rank server did not start: {error}")
        with self.changes:
            self.link = connected
            self.changes.notify_all()
            if self.closed:
                connected.hang_up()
        reports = open(connected.reports, encoding="utf-8", closefd=False)  # noqa: SIM115 - the link closes it
        with contextlib.suppress(ConnectionResetError):
            for line in reports:
                self.handle_report(json.loads(line))
        self.status = connected.end()
        self.note_end(f"the rank server (pid {connected.pid}) ended: {self.last_message()}")

    def note_end(self, reason: str) -> None:
        """Mark the server and all its jobs as gone, with the reason, and kill what ranks without a status had started."""
        with self.changes:
            self.gone = True
            for ranks in list(self.jobs.values()):
                for rank in set(ranks.pids) - set(ranks.statuses):
                    kill_group(ranks.pids[rank])  # the rank died with the server, what it started did not
                ranks.gone = True
                ranks.trouble = reason
            self.changes.notify_all()

    def handle_report(self, report: dict[str, Any]) -> None:
        """Note that the server is ready, or pass a report on to its job. A report on a job that has ended is dropped."""
        with self.changes:
            if "ready" in report:
                self.start_seconds = report["ready"]
            elif report["job"] in self.jobs:
                self.jobs[report["job"]].handle_report(report)
            self.changes.notify_all()

    def kill(self, reason: str) -> None:
        """Kill the server's process, if there is one yet; `reason` is then given as the cause of its end."""
        self.failure_text = reason
        if self.link:
            self.link.kill()

    def last_message(self) -> str:
        """Return why the server ended: our own reason, else the last line of its stderr, else its exit status."""
        if self.failure_text:
            return self.failure_text
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else self.status

    def wait_until_ready(self) -> None:
        """Return once the server has imported torch; LaunchError if it ended, or is not ready in READY_PATIENCE seconds."""
        with self.changes:
            self.changes.wait_for(lambda: self.gone or self.link, MEETING_PATIENCE)
            if not self.changes.wait_for(lambda: self.gone or self.start_seconds is not None, READY_PATIENCE):
                self.kill(f"it was not ready in {READY_PATIENCE:g} s and was killed")
        if self.gone or self.start_seconds is None:
            raise LaunchError(f"the rank server did not start: {self.last_message()}")

    def send_request(self, **request: Any) -> None:
        """Write one request to the server. It does nothing if there is no server, or it has ended."""
        with self.changes:
            if self.link and not self.gone:
                with contextlib.suppress(
                    BrokenPipeError, ConnectionResetError
                ):  # it just died; listen_to_reports() will say so
                    os.write(self.link.requests, json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        """End the server and every rank it has. launch() calls under way return, their ranks "lost".

        It does nothing if called again, or in a process forked from the one that made the server.
        """
        if self.owner_pid != os.getpid() or self.closed:
            return
        with self.changes:
            was_gone = self.gone
            self.gone = True
            self.closed = True
            if self.link is None or was_gone:  # listen_to_reports() hangs up as soon as there is one
                return
            self.link.hang_up()
        self.listener.join(CLOSE_PATIENCE)
        if self.listener.is_alive():
            self.link.kill()
            self.listener.join()

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_default: RankServer | None = None
_default_lock = threading.Lock()


def preloadable_modules(modules: Iterable[str], device: str) -> tuple[str, ...]:
    """Return the modules that a server may import for the ranks of a job: all of them on CPU, none on GPUs.

    torchao (0.18) asks for a GPU when it is imported, which starts CUDA, and no process forked after that can use it.
    """
    return tuple(modules) if device == "cpu" else ()


def default_server(modules: Iterable[str] = (), *, device: str = "cpu") -> RankServer:
    """Return this process's server. If there is none, or the last one died, meet or start one with these modules.

    A server that lives is returned whatever modules it was made with. Call it early: to start one takes 3 s.
    """
    global _default
    with _default_lock:
        if _default is None or _default.gone or _default.owner_pid != os.getpid():
            _default = RankServer(preloadable_modules(modules, device), connect_or_start)
            atexit.register(_default.close)
        return _default
