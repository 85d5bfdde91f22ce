"""The job that is to be started, and the folder in which one launch keeps all records about it.

job.json                the Job itself, as the ranks read it.
logs/rank_00.log        stdout and stderr.
failures/rank_00.json   the exception that ended the rank, if one did.
stacks/rank_00.txt      Python stacks, dumped on SIGUSR1 and by fatal signals.
inflight/rank_00.bin    the collectives it issued last; survives SIGKILL.
exits/rank_00.json      torchrun only: pid, host and exit status.
store                   local only: the FileStore through which the ranks meet.
"""

from __future__ import annotations

import json
import os
import resource
import shutil
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.core.case.launching import LONGEST_SECONDS
from harness.core.evidence.reading import parse_json, read_bytes
from harness.core.evidence.whole_file import open_whole_file

SUFFIXES = {"logs": "log", "failures": "json", "stacks": "txt", "inflight": "bin", "exits": "json"}
BYTES_PER_RANK = 1_000_000  # log, stacks and in-flight record of a short job; evidence is not counted

MAX_GROUP_TIMEOUT = 2**31 / 1000
"""Seconds that groups may take: torch counts them in milliseconds, in 32 bits."""


class LaunchError(Exception):
    """A launch that did not start. The message names the path or process concerned and the remedy."""


@dataclass(frozen=True)
class Job:
    """One launch: `entry` ("package.module:function") is called as function(options) on every rank."""

    directory: Path  # fresh for this launch
    world_size: int
    entry: str
    options: dict[str, Any] = field(default_factory=dict)  # JSON-able
    timeout: float = 120.0  # seconds for the whole job, held by the parent
    group_timeout: float = 60.0  # seconds, for every process group that is made without a timeout
    device: str = "cpu"
    env: dict[str, str] = field(default_factory=dict)
    """Added to what the ranks inherit; the local launcher's inherit what the harness had when its server started."""
    torchrun_args: tuple[str, ...] = ()
    """Replace "--standalone --nproc-per-node WORLD_SIZE"; then `directory` must be shared by the nodes."""
    preload: tuple[str, ...] = ()  # modules that the rank server imports once, if installed, for all later ranks
    slots: int | None = None  # of this machine; None: as many as it has ranks there; 0 for ranks that only wait
    ranks_per_gpu: int = 1
    """N: ranks 0 to N - 1 of a machine use its first GPU, which LOCAL_RANK names, the next N the second."""


def rank_file(directory: Path, kind: str, rank: int) -> Path:
    """Return the file of `kind` (a key of SUFFIXES) that belongs to `rank`."""
    return Path(directory) / kind / f"rank_{rank:02d}.{SUFFIXES[kind]}"


def prepare_folder(job: Job) -> Path:
    """Make the job's folders, write job.json, and return its path.

    LaunchError if the job or its directory cannot be used.
    """
    directory = Path(job.directory).absolute()
    refuse_unusable(job, directory)
    try:
        for kind in SUFFIXES:
            (directory / kind).mkdir(parents=True, exist_ok=True)
        needed = BYTES_PER_RANK * job.world_size
        free = shutil.disk_usage(directory).free
        if free < needed:
            raise LaunchError(f"{directory}: {free} bytes free, {job.world_size} ranks need {needed}: make room there")
        value = {**asdict(job), "directory": str(directory), "sys_path": absolute_sys_path()}
        write_json(directory / "job.json", value)
    except OSError as error:
        message = f"{directory}: cannot write ({error.strerror}): choose a directory that is writable and has room"
        raise LaunchError(message) from error
    return directory / "job.json"


def refuse_unusable(job: Job, directory: Path) -> None:
    """Raise LaunchError if the job cannot run in the directory, else do nothing.

    Refused is a folder of an earlier launch (unless torchrun_args are given), or a name that torch would cut. So are
    timeouts not above 0 or too long, and a file size limit (ulimit -f) below what a rank's log needs.
    """
    if (directory / "job.json").exists() and not job.torchrun_args:
        raise LaunchError(f"{directory}: holds the records of an earlier launch: choose a fresh directory")
    if set("?#;") & set(str(directory)):
        raise LaunchError(f"{directory}: torch cuts a file:// store's path at '?', '#' and ';': choose another name")
    for name, seconds, largest in (
        ("timeout", job.timeout, 5 * LONGEST_SECONDS),
        ("group_timeout", job.group_timeout, MAX_GROUP_TIMEOUT),
    ):
        if not 0 < seconds <= largest:  # nan is not above 0
            raise LaunchError(f"{name}: expected seconds above 0 and at most {largest:g}, got {seconds:g}")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
    if limit != resource.RLIM_INFINITY and limit < BYTES_PER_RANK:
        requirement = f"a rank's log and records need {BYTES_PER_RANK}"
        raise LaunchError(f"{directory}: a file may have {limit} bytes (ulimit -f), {requirement}: raise that limit")


def absolute_sys_path() -> list[str]:
    """Return sys.path with "" and relative entries made absolute, so that ranks can import what the harness can."""
    return [os.path.abspath(entry) for entry in sys.path]


def write_json(path: Path, value: Any) -> None:
    """Write a file that is complete or absent, whenever this process ends."""
    with open_whole_file(path) as file:
        file.write(json.dumps(value).encode())


def read_json(path: Path) -> Any:
    """Return the value in a JSON file; None if the file is absent or was never finished."""
    return parse_json(read_bytes(path)) if path.exists() else None
