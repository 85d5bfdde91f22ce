"""Ctrl-C for a command in a process of its own, and what is left of its processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path

from harness import ROOT


def interrupt(
    arguments: list[str],
    *,
    when: Callable[[], bool],
    cwd: Path,
    module: str = "harness",
    times: int = 1,
    by: int = signal.SIGINT,
) -> tuple[int, str]:
    """Ctrl-C once `when` is true, or another signal, which the command alone receives.

    Exit code and stderr; fails if a process of this run is left in /proc.
    """
    mark = f"HARNESS_TEST={uuid.uuid4()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), mark.split("=")[0]: mark.split("=")[1]}
    command = [sys.executable, "-m", module, *arguments]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(by, signal.SIG_DFL),  # a shell's background jobs ignore SIGINT, nohup's SIGHUP
    )
    try:
        assert eventually(when, seconds=100)
        assert len(marked(mark)) >= 3  # the harness, its server, a rank
        for _ in range(times):
            os.killpg(process.pid, by) if by == signal.SIGINT else process.send_signal(by)
            time.sleep(0.05)
        _, told = process.communicate(timeout=60)
        assert eventually(lambda: not marked(mark), seconds=10), marked(mark)
        return process.returncode, told
    finally:
        for left in marked(mark):
            os.kill(left, signal.SIGKILL)


def marked(mark: str) -> list[int]:
    """Processes with this in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # gone, or not ours
            continue
    return found


def eventually(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    return condition()
