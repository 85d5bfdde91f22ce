"""The harness's side of the rank server: start it, ask it for ranks, hear how they end. Any thread may launch."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from harness.launch.job import LaunchError
from harness.launch.process import kill_group
from harness.launch.python_path import python_path

READY_PATIENCE = 120.0  # importing torch takes 3 s, on a cold disk a minute
CLOSE_PATIENCE = 5.0
ONE_THREAD = {name: "1" for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")}


class LocalRanks:
    """The ranks of one job that the server forked (`supervise.Ranks`). Leaving the context kills those that live."""

    def __init__(self, server: RankServer, job_file: Path, world_size: int, modules: Iterable[str] = ()) -> None:
        """modules: what the server imports first, if it has not."""
        self.server, self.job_file, self.world_size, self.modules = server, job_file, world_size, tuple(modules)
        self.job = next(server.numbers)
        self.started = 0
        self.pids: dict[int, int] = {}
        self.statuses: dict[int, int] = {}
        self.ended: dict[int, float] = {}
        self.gone, self.trouble = False, ""

    def wait(self, done: Callable[[], bool], seconds: float) -> bool:
        with self.server.news:
            return self.server.news.wait_for(done, seconds)

    def signal(self, number: int) -> None:
        self.server.ask(signal=number, job=self.job)

    def give_up(self) -> None:
        self.server.kill("it did not answer (stopped?) and was killed")
        self.wait(lambda: self.gone, CLOSE_PATIENCE)

    def hear(self, report: dict[str, Any]) -> None:
        if "pid" in report:
            self.pids[report["rank"]] = report["pid"]
        elif "status" in report:
            self.statuses[report["rank"]] = report["status"]
            self.ended[report["rank"]] = report["ended"]
        else:
            self.gone, self.trouble = True, report["error"]

    def start(self) -> None:
        """To be called inside the context, so that an interrupt meets something that will clean up."""
        self.server.ready()
        self.server.jobs[self.job] = self
        self.started = self.world_size
        self.server.ask(start=self.job, path=str(self.job_file), world_size=self.world_size, modules=self.modules)

    def __enter__(self) -> LocalRanks:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self.wait(lambda: self.gone or len(self.statuses) == self.started, CLOSE_PATIENCE)
        self.server.jobs.pop(self.job, None)


class RankServer:
    """One server process, started at once in the background; many jobs, also at the same time.

    The ranks see the modules the server imported (torch, harness.reference.model) as they were then: after another version of
    one of these is checked out, close it and make another.
    """

    def __init__(self, modules: Iterable[str] = ()) -> None:
        """modules: what it imports besides, where it is there: a trainer's own dependencies."""
        self.modules = tuple(modules)
        self.news = threading.Condition()
        self.jobs: dict[int, LocalRanks] = {}
        self.numbers = itertools.count(1)
        self.seconds: float | None = None  # what starting took; None until it is ready
        self.gone, self.ill = False, ""
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - the server holds it too
        self.process, self.requests, reports = self.spawn()
        self.pid, self.owner = self.process.pid, os.getpid()
        threading.Thread(target=self.listen, args=(reports,), name="rank server reports", daemon=True).start()

    def spawn(self) -> tuple[subprocess.Popen, int, int]:
        """A session of its own: Ctrl-C is for the harness. Its input is closed when we are, whatever ends us."""
        theirs_in, ours_out = os.pipe()
        ours_in, theirs_out = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "harness.launch.server", str(theirs_in), str(theirs_out), *self.modules],
            pass_fds=(theirs_in, theirs_out),
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=self.errors,
            stderr=self.errors,
            start_new_session=True,
        )
        os.close(theirs_in)
        os.close(theirs_out)
        return process, ours_out, ours_in

    def listen(self, reports: int) -> None:
        with open(reports, encoding="utf-8") as lines:
            for line in lines:
                self.hear(json.loads(line))
        self.process.wait()
        with self.news:
            self.gone = True
            for ranks in list(self.jobs.values()):
                for rank in set(ranks.pids) - set(ranks.statuses):
                    kill_group(ranks.pids[rank])  # the rank died with the server, what it started did not
                ranks.gone, ranks.trouble = True, f"the rank server (pid {self.pid}) ended: {self.last_words()}"
            self.news.notify_all()

    def hear(self, report: dict[str, Any]) -> None:
        with self.news:
            if "ready" in report:
                self.seconds = report["ready"]
            elif report["job"] in self.jobs:
                self.jobs[report["job"]].hear(report)
            self.news.notify_all()

    def kill(self, why: str) -> None:
        self.ill = why
        self.process.kill()

    def last_words(self) -> str:
        if self.ill:
            return self.ill
        self.errors.seek(0)
        lines = self.errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else f"status {self.process.returncode}"

    def ready(self) -> None:
        """Wait until the server has imported torch; LaunchError if it never will."""
        with self.news:
            if not self.news.wait_for(lambda: self.gone or self.seconds is not None, READY_PATIENCE):
                self.kill(f"it was not ready in {READY_PATIENCE:g} s and was killed")
        if self.gone or self.seconds is None:
            raise LaunchError(f"the rank server (pid {self.pid}) did not start: {self.last_words()}")

    def ask(self, **request: Any) -> None:
        with self.news:
            if not self.gone:
                with contextlib.suppress(BrokenPipeError):  # it just died; listen() will say so
                    os.write(self.requests, json.dumps(request).encode() + b"\n")

    def close(self) -> None:
        """End the server and every rank it has. launch() calls under way return, their ranks "lost"."""
        if self.owner != os.getpid() or self.requests < 0:
            return
        with self.news:
            os.close(self.requests)
            self.requests, self.gone = -1, True
        try:
            self.process.wait(CLOSE_PATIENCE)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def __enter__(self) -> RankServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def environment() -> dict[str, str]:
    """Ours, one thread per library, and the harness importable from wherever we run."""
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": python_path()}


_default: RankServer | None = None
_default_lock = threading.Lock()


def default_server(modules: Iterable[str] = ()) -> RankServer:
    """This process's server, started now, with these modules, if there is none or the last one died. Call it early: it
    starts in 3 s."""
    global _default
    with _default_lock:
        if _default is None or _default.gone or _default.owner != os.getpid():
            _default = RankServer(modules)
            atexit.register(_default.close)
        return _default
