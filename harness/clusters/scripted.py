"""A process of a user's command that runs as one rank alone: as a recorded one, but of a world that is not there, on
tensors without memory. What has no contents is not looked at.

Called by the process's own imports (harness/recording/site). Changes torch for the rest of the process.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from pathlib import Path
from types import TracebackType
from typing import Any

from harness.clusters import imagined, neighbours, unable, world
from harness.clusters.commands import ALONE, unable_file
from harness.core.probe.without_memory import computing_with
from harness.core.probe.witness import Witness
from harness.recording import recorder
from harness.recording.recorder import Recorder

PREPARED = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining")
"""What reads a mesh is changed once it is there."""
_entered = contextlib.ExitStack()  # until the process ends


class Unobserved:
    """What stands for observers that a recording does not have."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class Watched:
    """The recorders of a command's rank, as a witness calls them."""

    def __init__(self, of: Recorder) -> None:
        self.clock, self.collectives = of.clock, of.collectives
        self.activity = self.copies = Unobserved()


def imported(module: str) -> None:
    recorder.imported(module)
    if module == "torch":
        assert recorder._recorder is not None
        _begin(recorder._recorder)


def _begin(of: Recorder) -> None:
    rank = int(os.environ["RANK"])
    world.join(rank, int(os.environ[ALONE]))
    for name in PREPARED:
        importlib.import_module(name)
    neighbours.vote_alone()
    mode = imagined.prepared()
    of.seen.reads_contents = False
    of.collectives.close()
    _note_what_cannot_be(unable_file(of.directory, rank))
    _end_behind(of, max(last for _, last in of.chosen.spans))
    _entered.enter_context(mode)
    _entered.enter_context(computing_with(mode))
    imagined.silence_propagation(_entered.enter_context(Witness(Watched(of))))  # type: ignore[arg-type]


def _end_behind(of: Recorder, last: int) -> None:
    """A rank alone need not train on: as the step begins that follows this one, its process ends."""
    between = of.clock.between_steps

    def over() -> None:
        between()
        if of.clock.finished >= last:
            of.end()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    of.clock.between_steps = over


def _note_what_cannot_be(file: Path) -> None:
    """Note why an error that ends the process says nothing of the script, if so."""
    hook = sys.excepthook

    def raised(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if reason := unable.why_unable(error, imagined.asked):
            file.write_text(reason, encoding="utf-8")
        hook(kind, error, trace)

    sys.excepthook = raised
