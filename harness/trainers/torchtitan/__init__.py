"""torchtitan, unmodified, as the trainer under test: the installed one, another version, or a checkout of any commit.

Its own mesh, data-parallel set-up, loop, clipping and optimizer are examined. Handed over as data are the model's sizes,
the seed weights, the samples and the recipe's learning rates; nothing of torchtitan's sources is edited.

    source.py     where torchtitan comes from, and what of it a case can request
    handover.py   the data handed over, and what torchtitan reports
    job.py        configuration, sizes and TrainSpec in the words of the time up to 2026-02
    early.py      2024-09 to 2025-03: a script with one function `main`
    middle.py     2025-03 to 2026-02, with 0.1.0 to 0.2.2: a Trainer
    later.py      since 2026-02-23, with 0.3.0: a Trainer, and configurations as objects
    sizes.py      the model's sizes among those
    paused.py     runs such a function up to where its set-up is done, and on from there
    cpu.py        what has to be arranged to run it on CPU; never applied on GPUs
    warm.py       imports it once for all ranks of a machine
    drift.py      names that torch has renamed since
    replaced.py   what does not run as torchtitan's users run it
    precise.py    torchtitan's casts to float32 leave a float64 recipe's values alone
"""

from __future__ import annotations

import dataclasses
import importlib
from dataclasses import dataclass
from pathlib import Path

from harness.spec.case import Case
from harness.spec.traits import TrainerTraits
from harness.trainers import Adapter, StartedTrainer
from harness.trainers.torchtitan import source


@dataclass(frozen=True)
class Torchtitan(Adapter):
    """harness.trainers.Adapter. where: a checkout, a folder that holds the package, or None for the installed one."""

    where: str | None = None
    name: str = "torchtitan"
    files: tuple[str, ...] = source.FILES

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]
        """What its era imports besides torch; of the installed one, itself."""
        try:
            era = source.find(self.where).era
        except source.NotThere:
            return ()
        return (
            *era.preload,
            *(("harness.trainers.torchtitan.warm",) if era.run_by == "later" and not self.where else ()),
        )

    @property
    def reports(self) -> tuple[str, ...]:  # type: ignore[override]
        return source.find(self.where).era.reports

    def of(self, where: str) -> Torchtitan:
        return dataclasses.replace(self, where=where)

    def traits(self, case: Case) -> TrainerTraits:
        return source.find(self.where).traits(case)

    def unsupported(self, case: Case) -> str | None:
        try:
            return next(source.find(self.where).obstacles(case), None)
        except source.NotThere as error:
            return str(error)

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        from harness.trainers.torchtitan.replaced import replaced

        return tuple(replaced(case, source.find(self.where), device))

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        if reason := self.unsupported(case):
            raise ValueError(f"case {case.name!r}: {self.name} cannot run it: {reason}")
        found = source.find(self.where)
        from harness.trainers.torchtitan import cpu, drift, precise

        if device == "cpu":
            cpu.arrange(found)
        drift.bridge()
        precise.set_dtype(case.training.dtype)
        runs = importlib.import_module(f"{__name__}.{found.era.run_by}")
        return runs.start(case, found, weights, device)

    def fqn(self, name: str) -> str:
        return source.find(self.where).era.fqn(name)


adapter = Torchtitan()
