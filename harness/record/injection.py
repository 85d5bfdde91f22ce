"""Running somebody's command so that its ranks are recorded, and why they may not have been.

PYTHONPATH is all that changes: Python finds the sitecustomize in harness/record/site before any other, and that one runs the
one it hides.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import ROOT
from harness.evidence.store import EvidenceError

SITE = Path(__file__).resolve().parent / "site"
PROCESSES = "processes"
STATES = ("started", "torch", "failed", "raised")
"""How far a process got, in names of files."""


class CommandError(Exception):
    """The command could not be started. The message is for the person who typed it."""


def environment(directory: Path, steps: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, (str(SITE), os.environ.get("PYTHONPATH", ""))))
    ours = {"HARNESS_RECORD": str(directory.resolve()), "HARNESS_RECORD_CODE": str(ROOT)}
    return {**os.environ, **ours, "HARNESS_RECORD_STEPS": steps, "PYTHONPATH": path}


def fresh(directory: Path) -> None:
    """Empty, and ours. Refuses to delete what is no recording. Raises EvidenceError."""
    try:
        if directory.exists() and any(directory.iterdir()):
            if not (directory / PROCESSES).exists():
                raise EvidenceError(f"{directory}: not empty and no recording; choose another -o")
            shutil.rmtree(directory)
        (directory / PROCESSES).mkdir(parents=True)
        (directory / "ranks").mkdir()
    except OSError as error:
        raise EvidenceError(f"{directory}: cannot be written: {error.strerror}; choose another -o") from error


def run(command: Sequence[str], directory: Path, steps: str) -> int:
    """Its exit code, or minus the signal that ended it. Raises CommandError where there is no such command."""
    try:
        process = subprocess.Popen(list(command), env=environment(directory, steps))
    except OSError as error:
        raise CommandError(f"{command[0]}: cannot be run: {error.strerror}") from error
    with _signals_for(process):
        return process.wait()


@contextlib.contextmanager
def _signals_for(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Who ends a recording means the job, and the page on what it was is still written. A terminal's Ctrl-C reaches every
    process by itself; other signals are handed on."""
    told = {signal.SIGINT: lambda *_: None, signal.SIGTERM: lambda number, _: process.send_signal(number)}
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, act) for number, act in told.items()}
    try:
        yield
    finally:
        for number, act in before.items():
            signal.signal(number, act)


def requested_ranks(command: Sequence[str]) -> int | None:
    """Of one node of torchrun, where the command says it in numbers."""
    text = " ".join(command)
    ranks = re.search(r"--nproc[-_]per[-_]node[= ](\d+)|--num[-_]processes[= ](\d+)", text)
    nodes = re.search(r"--nnodes[= ](\d+)", text)
    if ranks is None:
        return None
    return int(ranks.group(1) or ranks.group(2)) * (int(nodes.group(1)) if nodes and ranks.group(1) else 1)


def why_nothing(directory: Path, command: Sequence[str]) -> str:
    """The likely reason why no rank left evidence, from how far the command's processes got."""
    files = list((directory / PROCESSES).glob("*"))
    states = {state: [file for file in files if file.suffix == f".{state}"] for state in STATES}
    if states["failed"]:
        return f"the recorder failed: {states['failed'][0].read_text().strip()[:300]}"
    if not states["started"]:
        kept = [word for word in command if word in ("-I", "-E", "-S")]
        why = f"`python {kept[0]}` ignores it" if kept else "python -I, -E or -S, a container, another machine"
        return f"no Python process of the command took PYTHONPATH from it ({why}, or a script that sets its own)"
    if not states["torch"]:
        return f"{_processes(states['started'])} ran, and none imported torch"
    if states["raised"]:
        errors = Counter(file.read_text().strip() for file in states["raised"])
        (error, count), *_ = errors.most_common()
        return f"{_processes(states['torch'])} imported torch; {count} raised before training anything: {error}"
    return (
        f"{_processes(states['torch'])} imported torch, and in none a module with parameters was called while gradients "
        "were recorded: nothing was trained, or the job ended before its first forward pass"
    )


def _processes(files: Sequence[Path]) -> str:
    return f"{len(files)} Python process{'es' * (len(files) != 1)}"
