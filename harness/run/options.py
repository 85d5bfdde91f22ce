"""How to run, as opposed to what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: but for `fault`, nothing here may change a verdict. timeout: seconds for one launch.

    torchrun_args: for several nodes, in place of "--standalone --nproc-per-node WORLD_SIZE"; `out` must be shared.
    ranks_per_gpu: how many may share a GPU. backend: on GPUs, "nccl" or "gloo"; empty: as run/communication.py chooses.
    cases: the folder of cases as it was typed, for the command that runs it again; empty: the usual one.
    waits: its ranks will hang until the time limit, which takes no core meanwhile.
    """

    out: Path = Path("out")
    trainer: str = "llama3"
    launcher: str = "local"
    device: str = "cpu"
    timeout: float = 120.0
    fault: str | None = None
    torchrun_args: tuple[str, ...] = ()
    waits: bool = False
    ranks_per_gpu: int = 1
    backend: str = ""
    cases: str = ""


class Unsupported(Exception):
    """The trainer, or this machine, cannot run the case; the message is the reason. Not a verdict."""
