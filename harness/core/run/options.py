"""Options of a run: how it runs, as opposed to what."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Options:
    """How to run, as opposed to what: but for `fault`, nothing here may change a verdict."""

    out: Path = Path("out")
    """Folder of all evidence; for several nodes it must be shared."""
    trainer: str = "llama3"
    """Trainer under test: NAME or FILE.py, or either with @SOURCE."""
    launcher: str = "local"
    """What starts ranks: local or torchrun."""
    device: str = "cpu"
    """Device that ranks compute on: cpu or cuda."""
    timeout: float = 120.0
    """Seconds for one launch."""
    fault: str | None = None
    """Fault that is planted, as FILE.py:NAME; None for none."""
    torchrun_args: tuple[str, ...] = ()
    """Arguments of torchrun for several nodes, instead of "--standalone --nproc-per-node WORLD_SIZE"."""
    waits: bool = False
    """Whether its ranks will hang until the time limit, which takes no core meanwhile."""
    ranks_per_gpu: int = 1
    """How many ranks may share a GPU."""
    backend: str = ""
    """On GPUs, "nccl" or "gloo"; empty: as run/communication.py chooses."""
    map: Path | None = None
    """Folder of the map: for each case, the functions that it runs. None: they are not recorded."""
    nth: int = 0
    """Number of this run among those of the same request in a row; 0 is the first."""
    cases: str = ""
    """Folder of cases as typed, for the command that runs it again; empty: the usual one."""


class Unsupported(Exception):
    """The trainer, or this machine, cannot run the case; the message is the reason. Not a verdict."""
