"""Recorded jobs whose ranks are forked from one process that has torch imported, instead of each importing it again.

`forked_main` is harness.core.cli.main, except for how a recorded command is started. It can start these:

    python FILE ..    python -c CODE ..    python -m torch.distributed.run --standalone --nproc-per-node N FILE ..

A rank has the environment, the sitecustomize and the folder that it would have, and ends as an interpreter ends. Tests of how
a process starts, is signalled or is killed use `main`, and so real processes.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest

from harness import ROOT
from harness.core.cli import main
from harness.recording import injection

Main = Callable[[list[str]], int]
TORCHRUN = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
START = "import sys, forked_ranks; forked_ranks.serve(*map(int, sys.argv[1:]))"


@dataclass(frozen=True)
class ForkedJob:
    """What a forked rank is told, as JSON."""

    ranks: int
    code: str | None
    """Of `python -c`, else None."""
    arguments: list[str]
    """sys.argv."""
    environment: dict[str, str]
    folder: str
    """The working folder."""
    stdout: str
    stderr: str
    """Files that its output is appended to."""
    port: int
    """Where its TCPStore listens. 0: no launcher started it."""
    run: str
    """torchrun's id of the job."""


class JobForker:
    """The process that forks. A new one for each session of tests, or worker of it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._numbers = itertools.count()
        theirs_in, self._requests = os.pipe()
        self._reports, theirs_out = os.pipe()
        paths = os.pathsep.join([str(Path(__file__).parent), str(ROOT)])
        environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        command = [sys.executable, "-c", START, str(theirs_in), str(theirs_out)]
        self._process = subprocess.Popen(
            command, env=environment, pass_fds=(theirs_in, theirs_out), stdin=subprocess.DEVNULL, start_new_session=True
        )
        os.close(theirs_in)
        os.close(theirs_out)
        self._unread = b""

    def close(self) -> None:
        os.close(self._requests)
        self._process.wait()
        os.close(self._reports)

    def run(
        self,
        command: Sequence[str],
        directory: Path,
        steps: str,
        *,
        extra_environment: Mapping[str, str] | None = None,
        log: Path | None = None,
        timeout: float | None = None,
        before_exec: Callable[[], None] | None = None,
    ) -> int:
        """Do what injection.run does. first: not called, as no process is started."""
        if missing := injection.missing_script(command):
            raise injection.CommandError(f"{missing}: no such file")
        number = next(self._numbers)
        folder = self._folder / str(number)
        folder.mkdir()
        outputs = [log or folder / "stdout", log or folder / "stderr"]
        for output in outputs:
            output.touch()
        environment = injection.environment_for_recording(directory, steps) | dict(extra_environment or {})
        ranks, words = split_launcher(command)
        store = master_store() if ranks else None
        job = ForkedJob(
            ranks=ranks or 1,
            code=words[1] if words[0] == "-c" else None,
            arguments=["-c", *words[2:]] if words[0] == "-c" else words,
            environment=environment,
            folder=os.getcwd(),
            stdout=str(outputs[0]),
            stderr=str(outputs[1]),
            port=store.port if store else 0,
            run=str(uuid.uuid4()),
        )
        (folder / "job.json").write_text(json.dumps(asdict(job)))
        try:
            statuses = self._wait(number, folder / "job.json", job.ranks, command, timeout)
        finally:
            if log is None:
                for fd, output in zip((1, 2), outputs, strict=True):
                    os.write(fd, output.read_bytes())
        if store is None:
            return statuses[0]
        return launcher_end(directory, statuses)

    def _wait(
        self, number: int, path: Path, ranks: int, command: Sequence[str], timeout: float | None
    ) -> dict[int, int]:
        """Return the status of each rank. Once one failed, the others are told to end, as torchrun does."""
        self._send(start=number, path=str(path), world_size=ranks, modules=[])
        statuses: dict[int, int] = {}
        failed: dict[int, int] = {}
        limit = time.monotonic() + (timeout or 600.0)
        while len(statuses) < ranks:
            for report in self._read(limit):
                if report.get("job") != number:
                    continue
                if "error" in report:
                    raise OSError(report["error"])
                if "status" in report:
                    statuses[report["rank"]] = report["status"]
            ending = {rank: status for rank, status in statuses.items() if status}
            if ending and not failed:
                failed = ending
                self._send(signal=signal.SIGTERM, job=number)
            if time.monotonic() > limit:
                self._send(signal=signal.SIGKILL, job=number)
                raise subprocess.TimeoutExpired(list(command), timeout or 600.0)
        return failed or statuses

    def _send(self, **request: Any) -> None:
        os.write(self._requests, json.dumps(request).encode() + b"\n")

    def _read(self, limit: float) -> list[dict[str, Any]]:
        """Return the reports that have come, none once it is `limit` o'clock."""
        ready, _, _ = select.select([self._reports], [], [], max(0.0, limit - time.monotonic()))
        if not ready:
            return []
        data = os.read(self._reports, 65536)
        if not data:
            raise EOFError(f"the process that forks ranks ended with status {self._process.wait()}")
        *lines, self._unread = (self._unread + data).split(b"\n")
        return [json.loads(line) for line in lines]


def split_launcher(command: Sequence[str]) -> tuple[int, list[str]]:
    """Return the ranks that torchrun is to start, 0 without it, and the words that follow `python` in each of them."""
    words = list(command)
    if words[0] != sys.executable:
        raise ValueError(f"{words[0]} cannot be forked: use main, which starts it")
    if words[1 : 1 + len(TORCHRUN)] == TORCHRUN:
        return int(words[5]), words[6:]
    if words[1] == "-c" or words[1].endswith(".py"):
        return 0, words[1:]
    raise ValueError(f"`{' '.join(words[:3])}` cannot be forked: use main, which starts it")


def master_store() -> Any:
    """Return the store that torchrun's agent has for its ranks."""
    from torch.distributed import TCPStore

    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def launcher_end(directory: Path, statuses: Mapping[int, int]) -> int:
    """Return torchrun's exit code, and leave what is recorded of it. statuses: of those that failed, else of all."""
    file = directory / injection.PROCESSES_FOLDER / f"{os.uname().nodename}-{os.getpid()}"
    file.with_suffix(".launcher").touch()
    if not any(statuses.values()):
        return 0
    file.with_suffix(".ends").write_text(json.dumps(statuses))
    return 1


@pytest.fixture(scope="session")
def forked_main(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Main]:
    """`main`, whose recorded commands are run in ranks that are forked."""
    forkers: list[JobForker] = []

    def run(*words: Any, **options: Any) -> int:
        if not forkers:
            forkers.append(JobForker(tmp_path_factory.mktemp("forked")))
        return forkers[0].run(*words, **options)

    def forked(words: list[str]) -> int:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(injection, "run_recorded_command", run)
            return main(words)

    yield forked
    for forker in forkers:
        forker.close()
