"""The base class of a script's adapter: a subclass gives the script's file, its names, its flags, and what makes its
samples.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from harness.adapters.support.checkout import put_first
from harness.adapters.support.requests import beyond
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.trainers import Adapter, StartedTrainer
from harness.core.trainers.support.names import renamed

if TYPE_CHECKING:
    from torch import nn

    from harness.adapters.support.script import Script

MARKS = (".git", "pyproject.toml", "setup.py")
"""Files of a repository's root."""


class ScriptAdapter(Adapter):
    """An adapter that runs a script as it is. `harness init` writes a subclass."""

    script: Path
    """The script's file."""
    names: Mapping[str, str] = MappingProxyType({})
    """The reference's name by the script's, a part of a name each."""
    known: Mapping[str, Any] = MappingProxyType({})
    """What of a case the arguments pass on, as `beyond` takes it."""
    replaces: tuple[str, ...] = ()
    """What of the script does not run as its users run it."""
    saves: str | None = None
    """The script's function that saves a checkpoint; None if it does not save and resume."""
    reports = ()

    def arguments(self, case: Case, device: str) -> list[str]:
        """Return the words of the command line that request the case. A subclass must define it."""
        raise NotImplementedError

    def samples(self, script: Script, case: Case, rank: int) -> None:
        """Put the recipe's samples in the place of the script's own, before it starts. rank: data-parallel rank."""

    def ready(self, model: nn.Module, case: Case) -> None:
        """Do what is left to do before the first step. model: what the script calls, wrapper included."""

    def of(self, source: str) -> ScriptAdapter:
        """Return a copy of this adapter for the same script in another checkout. source: the root of that checkout."""
        other = copy.copy(self)
        other.script = Path(source).resolve() / self.script.resolve().relative_to(repository(self.script))
        return other

    def traits(self, case: Case) -> TrainerTraits:
        """Return traits that say only that the model is the script's own: in float32 it rounds at other places than the
        reference.
        """
        return TrainerTraits(own_model=True)

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        return self.replaces

    def unsupported(self, case: Case) -> str | None:
        return next(beyond(case, self.known, self.name, saves=self.saves is not None), None)

    def fqn(self, name: str) -> str:
        return renamed(name, self.names)

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        return StartedScript(self, case, weights, device)


class StartedScript(StartedTrainer):
    """The started trainer of a script, which ran up to its first forward pass that trains."""

    def __init__(self, adapter: ScriptAdapter, case: Case, weights: Path | None, device: str) -> None:
        from harness.adapters.support.script import Script
        from harness.core.trainers.support.weights import load_weights

        def load(model: nn.Module) -> None:
            if not case.resume:  # else the script has read its checkpoint
                load_weights([model], case, weights, adapter.fqn, adapter.rows(case), fused=adapter.fused(case))

        import_from(repository(adapter.script))
        self.script = Script(adapter.script, case.training.dtype)
        self.metrics = []
        adapter.samples(self.script, case, int(os.environ["RANK"]) // (case.dims.cp * case.dims.tp) % case.dims.dp)
        if case.saved_step and adapter.saves:
            self.script.hold(adapter.saves)
        self.model_parts = [self.script.set_up(adapter.arguments(case, device), load)]
        adapter.ready(self.model_parts[0], case)

    def train(self, last_step: int) -> None:
        self.script.run()

    def save(self, folder: Path) -> None:
        """Run the function of the script that is held, which saves where its arguments say. `folder` is not used."""
        self.script.run()

    def resume(self, folder: Path) -> None:
        """Do nothing: the script has read its checkpoint."""


def repository(script: Path) -> Path:
    """Return the nearest folder above the script that is a repository's root; without any, the script's own folder."""
    folders = script.resolve().parents
    for folder in folders:
        if any((folder / mark).exists() for mark in MARKS):
            return folder
    return folders[0]


def import_from(root: Path) -> None:
    """Put a repository's root, and src in it if it is there, first in sys.path."""
    for folder in (root, root / "src"):
        if folder.is_dir():
            put_first(str(folder))
