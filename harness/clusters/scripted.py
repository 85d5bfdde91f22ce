"""One process of a user's command that runs as one rank alone: recorded, in a fake world, on tensors without memory.

Contents of tensors are not read. The process's own imports call it (harness/recording/site). It changes torch for the
rest of the process.
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
from harness.clusters.commands import ALONE_VARIABLE, unable_file
from harness.core.probe.without_memory import registered_mode
from harness.core.probe.witness import Witness
from harness.recording import recorder
from harness.recording.recorder import Recorder

MODULES_WITH_MESHES = ("torch.distributed.fsdp", "torch.distributed.tensor.parallel", "torch.distributed.pipelining")
"""What reads a mesh is changed once it is there."""
_entered = contextlib.ExitStack()  # until the process ends


class NoObserver:
    """A stand-in for the observers that a recording does not have: each of its methods does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args: None


class LoneRankObservers:
    """The observers of a command's rank, with the attributes that a Witness calls: the recorder's, and stand-ins for
    the others."""

    def __init__(self, recorder_of_rank: Recorder) -> None:
        self.clock = recorder_of_rank.clock
        self.collectives = recorder_of_rank.collectives
        self.activity = self.copies = NoObserver()


def imported(module: str) -> None:
    """Install the recorder's patches for a module that was just imported; after torch itself, begin to run as a rank
    alone."""
    recorder.imported(module)
    if module == "torch":
        assert recorder._recorder is not None
        _begin_rank(recorder._recorder)


def _begin_rank(recorder_of_rank: Recorder) -> None:
    """Join a fake world as the rank of RANK, and enter the mode of tensors without memory for the rest of the process.

    The recorder no longer reads tensors' contents, and the process ends after the last recorded step.
    """
    rank = int(os.environ["RANK"])
    world.join_fake_world(rank, int(os.environ[ALONE_VARIABLE]))
    for name in MODULES_WITH_MESHES:
        importlib.import_module(name)
    neighbours.vote_alone()
    mode = imagined.prepare_torch()
    recorder_of_rank.observer.reads_contents = False
    recorder_of_rank.collectives.close()
    _note_why_unable(unable_file(recorder_of_rank.directory, rank))
    _end_after_step(recorder_of_rank, max(last for _, last in recorder_of_rank.chosen.spans))
    _entered.enter_context(mode)
    _entered.enter_context(registered_mode(mode))
    imagined.silence_propagation(_entered.enter_context(Witness(LoneRankObservers(recorder_of_rank))))  # type: ignore[arg-type]


def _end_after_step(recorder_of_rank: Recorder, last: int) -> None:
    """Patch the recorder's clock to end the process, with exit code 0, once step `last` is finished and recorded."""
    between_steps = recorder_of_rank.clock.on_between_steps

    def end_if_over() -> None:
        """Run the clock's own function between steps; after step `last`, end the recording and the process."""
        between_steps()
        if recorder_of_rank.clock.last_finished_step >= last:
            recorder_of_rank.write_last_record()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    recorder_of_rank.clock.on_between_steps = end_if_over


def _note_why_unable(file: Path) -> None:
    """Patch sys.excepthook to write the reason into `file` if an error comes of running alone, and not of the script."""
    hook = sys.excepthook

    def note_reason(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if reason := unable.why_unable(error, imagined.asked_codes):
            file.write_text(reason, encoding="utf-8")
        hook(kind, error, trace)

    sys.excepthook = note_reason
