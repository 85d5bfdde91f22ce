"""This process's rank and world size, and its claim on the file of that rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

from harness.recording.folders import JOB_FILE, MOST_JOBS, job_folders

RANK_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
)

JOB_VARIABLES = ("REPLICA_GROUP_ID", "TORCHELASTIC_RUN_ID", "MASTER_PORT")


def rank_and_world() -> tuple[int, int]:
    """Return rank and world size as torch.distributed has them, else as the launcher set them, else rank 0 of 1."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, world in RANK_VARIABLES:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def is_rank_named() -> bool:
    """Return whether a launcher's environment has the rank of this process."""
    return any(rank in os.environ and world in os.environ for rank, world in RANK_VARIABLES)


def job_name() -> str:
    """Return the name of this process's job: all its ranks have it, and those of another job that runs beside it do not.

    torchrun gives a new port after a restart, and then a name to the job. Empty if no variable of a job is set.
    """
    job_variables = {name: os.environ.get(name, "") for name in JOB_VARIABLES}
    if job_variables["TORCHELASTIC_RUN_ID"] not in ("", "none"):
        job_variables["MASTER_PORT"] = ""
    return " ".join(f"{name}={text}" for name, text in job_variables.items() if text not in ("", "none"))


def claim_folder(directory: Path, rank: int) -> Path | None:
    """Claim a folder for this process's evidence: the first of its job in which no other process is this rank.

    After a restart by torchrun, the first new process takes the folder of the old one. None if no folder can be claimed.
    """
    job = job_name()
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    rank_name = f"rank_{rank:05d}.{attempt}"
    process_text = json.dumps({"host": os.uname().nodename, "pid": os.getpid(), "parent": os.getppid()})
    try:
        for folder in job_folders(directory):
            (folder / "processes").mkdir(parents=True, exist_ok=True)
            (folder / "ranks").mkdir(exist_ok=True)
            if _write_if_absent(folder / "processes" / JOB_FILE, job) and _write_if_absent(
                folder / "processes" / rank_name, process_text, alone=True
            ):
                for state in ("ends", "error"):
                    _rank_file(folder, rank, state).unlink(missing_ok=True)
                return folder
        print(f"harness: {MOST_JOBS} processes train as rank {rank} already; this one is not recorded", file=sys.stderr)
    except OSError as error:
        print(f"harness: this process is not recorded: {error}", file=sys.stderr)
    return None


def _write_if_absent(file: Path, text: str, *, alone: bool = False) -> bool:
    """Write a file that does not exist yet. Return whether it has this text now; if `alone`, whether this process wrote it.

    A file exists with all of its text or not at all.
    """
    temporary_file = file.with_name(f".{os.uname().nodename}-{os.getpid()}")
    temporary_file.write_text(text, encoding="utf-8")
    try:
        os.link(temporary_file, file)
    except FileExistsError:
        return not alone and file.read_text(encoding="utf-8") == text
    finally:
        temporary_file.unlink()
    return True


def report_unsaved(directory: Path, rank: int, why: str) -> None:
    """Report why the rank's record was not written, on stderr and in a file beside the records."""
    print(f"harness: {why}", file=sys.stderr)
    with contextlib.suppress(OSError):  # of a full disk
        (directory / "processes" / f"rank_{rank:05d}.failed").write_text(why)


def note_exit_at_once(directory: Path, rank: int, code: int, error: str) -> None:
    """Record an exit by os._exit, which runs nothing of what Python runs as it ends."""
    with contextlib.suppress(OSError):  # a full disk: its exit is not reported
        _rank_file(directory, rank, "ends").write_text(json.dumps({rank: code}), encoding="utf-8")
        if error:
            _rank_file(directory, rank, "error").write_text(error, encoding="utf-8")


def _rank_file(directory: Path, rank: int, state: str) -> Path:
    return directory / "processes" / f"rank_{rank:05d}.{state}"


def note_model_called(directory: Path) -> None:
    """Note in a file that this process called a model, where its rank is not known yet. A full disk leaves no note."""
    with contextlib.suppress(OSError):  # of a full disk
        (directory / "processes" / f"{os.uname().nodename}-{os.getpid()}.called").touch()


def note_early_error(directory: Path, error: str) -> None:
    """Record in a file the error of a process that had trained nothing yet. Others of its job seldom get further."""
    with contextlib.suppress(OSError):  # the traceback says it as well
        (directory / "processes" / f"{os.uname().nodename}-{os.getpid()}.raised").write_text(error)
