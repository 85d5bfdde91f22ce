"""How to run, as opposed to what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: but for `fault`, nothing here may change a verdict."""

    out: Path = Path("out")  # for several nodes it must be shared
    trainer: str = "llama3"
    launcher: str = "local"
    device: str = "cpu"
    timeout: float = 120.0  # seconds for one launch
    fault: str | None = None
    torchrun_args: tuple[str, ...] = ()  # for several nodes, instead of "--standalone --nproc-per-node WORLD_SIZE"
    waits: bool = False  # its ranks will hang until the time limit, which takes no core meanwhile
    ranks_per_gpu: int = 1  # how many may share a GPU
    backend: str = ""  # on GPUs, "nccl" or "gloo"; empty: as run/communication.py chooses
    map: Path | None = None  # where it is kept which functions each case runs; None: it is not recorded
    nth: int = 0  # which run of the same request in a row; 0 is the first
    cases: str = ""  # the folder of cases as typed, for the command that runs it again; empty: the usual one


class Unsupported(Exception):
    """The trainer, or this machine, cannot run the case; the message is the reason. Not a verdict."""
