"""The adapter of torchtitan, unmodified, as the trainer under test: the installed one, another version, or a checkout
of any commit.

Its own mesh, data-parallel set-up, loop, clipping and optimizer are examined. Handed over as data are the model's
sizes, the seed weights, the samples and the recipe's learning rates; nothing of torchtitan's sources is edited.

    source.py           where torchtitan comes from, and which version it is.
    syntax.py           what its files define and call, without importing them.
    eras.py             what each version can be requested.
    expected.py         what it gets wrong in a known way.
    obstacles.py        why a case is not requested of one.
    main_function.py    runs `main(job_config)` of a script: 2024-09 to 2025-03.
    train_spec.py       runs `Trainer(job_config)` with a TrainSpec: 2025-03 to 2026-02, 0.1.0 to 0.2.2.
    trainer_config.py   runs `Trainer.Config().build()`: since 2026-02-23, 0.3.0.
    trainer.py          its Trainer as the one that is driven.
    job_config.py       the case in a JobConfig and a TrainSpec.
    model_config.py     the case's sizes in a model configuration.
    options.py          the options that all these configurations have.
    data_loader.py      the case's samples as its data loader.
    metrics.py          what it reports.
    cpu.py              what has to be arranged to run it on CPU; never applied on GPUs.
    torch_names.py      names that torch has renamed since.
    preload.py          imports it once for all ranks of a machine.
    replaced.py         what does not run as torchtitan's users run it.
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.adapters.torchtitan import source
from harness.adapters.torchtitan.eras import TRAINER_CONFIG
from harness.adapters.torchtitan.obstacles import obstacles
from harness.core.case.case import Case
from harness.core.case.traits import TrainerTraits
from harness.core.trainers import Adapter, StartedTrainer
from harness.core.trainers.support.alone import needs_memory


@dataclass(frozen=True)
class Torchtitan(Adapter):
    """The adapter of one torchtitan. See harness.core.trainers.Adapter for its methods.

    spmd_backend: parallelism.spmd_backend of versions that have it; None: the default of its users, or
    "partial_dtensor" where that cannot start. A FILE.py with `adapter = Torchtitan(spmd_backend="full_dtensor")` is a
    trainer.

    options: other options of torchtitan, as its users give them: {"metrics.log_freq": 2}; None leaves one as torchtitan
    has it where the case would say. With one of `lr_scheduler` its own learning rates are under test, and the case says
    `rates`. With validation on by these, it is of the samples of the step that comes next, and its loss is judged as
    that step's.
    """

    where: str | None = None  # a checkout, a folder that holds the package, or None for the installed one
    spmd_backend: str | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    chosen: Mapping[str, Any] = field(default_factory=dict)  # traits that it is judged by instead of its version's
    shows: bool = True  # False where nothing that it reports is judged
    name: str = "torchtitan"
    files: tuple[str, ...] = source.FILES

    @property
    def preload(self) -> tuple[str, ...]:  # type: ignore[override]
        """Return the modules that the rank server imports for this era in addition to torch. Empty if no torchtitan is found.

        An installed torchtitan of the newest API is itself among them.
        """
        try:
            era = self._installed_source().era
        except source.NotThere:
            return ()
        return (
            *era.preload,
            *((f"{__name__}.preload",) if era.run_by == TRAINER_CONFIG.run_by and not self.where else ()),
        )

    @property
    def reports(self) -> tuple[str, ...]:  # type: ignore[override]
        return self._installed_source().era.reports if self.shows else ()

    @property
    def reports_every(self) -> int:  # type: ignore[override]
        return self.options.get("metrics.log_freq", 1)

    def of(self, where: str) -> Torchtitan:
        return dataclasses.replace(self, where=where)

    def traits(self, case: Case) -> TrainerTraits:
        return dataclasses.replace(self._installed_source().traits(case), **self.chosen)

    def unsupported(self, case: Case) -> str | None:
        """Return why this torchtitan cannot run the case: it is not there, or the first obstacle. None if it can."""
        try:
            installed = self._installed_source()
            types = source.is_by_types(case, installed.era, self.spmd_backend)
            return next(obstacles(case, installed.era, installed.traits(case), types=types), None)
        except source.NotThere as error:
            return str(error)

    def replaced(self, case: Case, device: str) -> tuple[str, ...]:
        """Return a sentence for each part of torchtitan that does not run as its users run it. Raises NotThere."""
        from harness.adapters.torchtitan.replaced import replaced_parts

        return tuple(replaced_parts(case, self._installed_source(), device))

    def unsupported_alone(self, case: Case) -> str | None:
        """Return why a rank of the case cannot run alone, in pre-flight; None if it can.

        Numbers are not compared there, so the case's precision and its scaling of rotary frequencies do not count.
        """
        features = dataclasses.replace(case.features, reduce_dtype=None)
        model = dataclasses.replace(case.model, rope_scaling=None)
        training = dataclasses.replace(case.training, dtype="float64", compute_dtype=None)
        if reason := self.unsupported(dataclasses.replace(case, model=model, training=training, features=features)):
            return reason
        if case.dims.pp > 1 and case.dims.tp > 1 and self._exchanges_by_types(case):
            return "what the stages of a pipeline exchange with spmd_backend spmd_types is not known alone"
        return next(needs_memory(case), None)

    def _exchanges_by_types(self, case: Case) -> bool:
        """Return whether a pipeline's stages exchange what spmd_types says. False for torchtitan before 2026-02-23."""
        if self._installed_source().era.run_by != TRAINER_CONFIG.run_by:
            return False
        return source.is_by_types(case, self._installed_source().era, self.spmd_backend)

    def importable(self) -> None:
        """Have imports find this torchtitan first, and forget another one that is imported already. Raises NotThere."""
        installed = self._installed_source()
        source.forget_another(installed.package)
        folder = str(installed.folder)
        if sys.path[0] != folder:
            sys.path.insert(0, folder)

    def dry(self, case: Case) -> StartedTrainer:
        return self._run(case, None, "cpu")

    def start(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Return the started trainer of a case. Raises ValueError if torchtitan cannot run the case."""
        if reason := self.unsupported(case):
            raise ValueError(f"case {case.name!r}: {self.name} cannot run it: {reason}")
        return self._run(case, weights, device)

    def _run(self, case: Case, weights: Path | None, device: str) -> StartedTrainer:
        """Arrange this process for torchtitan and return the trainer, started by the module for its era. weights: None
        for the seed's.

        On CPU, torch is patched. The recipe's learning rates are put in unless an option of `lr_scheduler` is given.
        """
        from harness.adapters.support import float64, learning_rate
        from harness.adapters.torchtitan import cpu, torch_names
        from harness.core.trainers.support import cpu_attention, process_group

        installed = self._installed_source()
        self.importable()
        os.environ.setdefault("LOCAL_RANK", "0")
        if device == "cpu":
            cpu.patch_for_cpu(installed)
            cpu_attention.support_ring(case)
        torch_names.add_missing_names()
        float64.preserve(case.training.dtype)
        process_group.redirect()
        if not any(name.startswith("lr_scheduler.") for name in self.options):
            learning_rate.follow_recipe(case)
        runs = importlib.import_module(f"{__name__}.{installed.era.run_by}")
        return runs.start(case, installed, weights, device)

    def _installed_source(self) -> source.Source:
        """Return the torchtitan at `where`, or the installed one, with this adapter's options. Raises NotThere."""
        return dataclasses.replace(source.find_source(self.where), spmd_backend=self.spmd_backend, options=self.options)

    def fqn(self, name: str) -> str:
        return self._installed_source().era.fqn(name)


adapter = Torchtitan()
