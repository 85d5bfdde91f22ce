"""Which rank of how many this process is, and whether the file of that rank is its own to write."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from pathlib import Path

import torch.distributed as dist

RANKS = (("RANK", "WORLD_SIZE"), ("SLURM_PROCID", "SLURM_NTASKS"), ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"))


def place_of() -> tuple[int, int]:
    """As torch.distributed has it, else as launchers do; rank 0 of 1 where nobody says anything."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, world in RANKS:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1


def is_named() -> bool:
    """Return whether a launcher's environment says which rank this process is."""
    return any(rank in os.environ and world in os.environ for rank, world in RANKS)


def claimed(directory: Path, rank: int) -> bool:
    """The first process that trains as a rank has its file, and after a restart by torchrun the first of the new ones."""
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    try:
        with (directory / "processes" / f"rank_{rank:05d}.{attempt}").open("x") as file:
            file.write(f"{os.uname().nodename}-{os.getpid()}")
        for state in ("ends", "error"):
            _of_rank(directory, rank, state).unlink(missing_ok=True)
        return True
    except FileExistsError:
        print(f"harness: another process trains as rank {rank} already; this one is not recorded", file=sys.stderr)
    except OSError as error:
        print(f"harness: this process is not recorded: {error}", file=sys.stderr)
    return False


def unsaved(directory: Path, rank: int, why: str) -> None:
    """Said, and left for whoever looks for the record."""
    print(f"harness: {why}", file=sys.stderr)
    with contextlib.suppress(OSError):  # of a full disk
        (directory / "processes" / f"rank_{rank:05d}.failed").write_text(why)


def left_at_once(directory: Path, rank: int, code: int, error: str) -> None:
    """By os._exit, which runs nothing of what Python runs as it ends."""
    with contextlib.suppress(OSError):  # of a full disk: nothing is heard of its end, then
        _of_rank(directory, rank, "ends").write_text(json.dumps({rank: code}), encoding="utf-8")
        if error:
            _of_rank(directory, rank, "error").write_text(error, encoding="utf-8")


def _of_rank(directory: Path, rank: int, state: str) -> Path:
    return directory / "processes" / f"rank_{rank:05d}.{state}"


def called(directory: Path) -> None:
    """A process of which no rank is known yet called a model."""
    with contextlib.suppress(OSError):  # of a full disk
        (directory / "processes" / f"{os.uname().nodename}-{os.getpid()}.called").touch()


def raised_early(directory: Path, error: str) -> None:
    """By a process that had trained nothing yet. Others of its job seldom get further."""
    with contextlib.suppress(OSError):  # the traceback says it as well
        (directory / "processes" / f"{os.uname().nodename}-{os.getpid()}.raised").write_text(error)
