"""The work of one process: it runs one rank of a world that does not exist, under the probe, and writes its evidence.

One rank a process: DTensor keeps groups of a world that is gone, and torch is changed for good.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from harness.core import rings, trainers
from harness.core.case.case import Case
from harness.core.case.loading import from_json
from harness.core.evidence.codec import encoded_without_values
from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.evidence.store import write_text
from harness.core.run.rank_main import evidence_in_reference_names

if TYPE_CHECKING:
    from harness.core.probe.storages import StorageRecorder


def run_lone_rank(options: dict[str, Any]) -> object:
    """Train as one rank of a world that does not exist, write its evidence, and return the trainer.

    If it cannot be run alone, the reason is written to a file; every error is raised again. options: case, trainer,
    fault, directory (of the evidence), ranks (which rank of the world each process is).
    """
    started = time.process_time()
    case = from_json(options["case"])
    adapter = trainers.load_adapter(options["trainer"])
    this_rank = options["ranks"][int(os.environ["RANK"])]
    try:
        trainer, evidence, storages = _train_watched(case, adapter, this_rank, options.get("fault"))
    except Exception as error:
        _note_if_unable(error, unable_file(Path(options["directory"]), this_rank))
        raise
    usage = RankUsage(
        seconds=time.process_time() - started,
        bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        most=storages.peak.bytes,
        phase=storages.peak.phase,
        outside=storages.peak_outside_of_steps,
    )
    record = {"used": dataclasses.asdict(usage), "evidence": encoded_without_values(evidence)}
    write_text(evidence_file(Path(options["directory"]), this_rank), json.dumps(record))
    return trainer


@dataclass(frozen=True)
class RankUsage:
    """Time and memory that one rank used which ran alone. Its tensors have no memory: counted is what its GPU would hold."""

    seconds: float
    """Processor time in which it built its model and trained, in seconds."""
    bytes: int
    """Peak memory of its process on the host, in bytes."""
    most: int
    """Peak of the bytes of its tensors, in a step."""
    phase: str
    """Phase of the step in which `most` was reached."""
    outside: int
    """Peak of the bytes of its tensors outside of steps, as while its model is built."""


def evidence_file(directory: Path, rank: int) -> Path:
    """Return the file of a rank's evidence."""
    return directory / f"rank_{rank:05d}.json"


def unable_file(directory: Path, rank: int) -> Path:
    """Return the file with the reason why a rank could not be run alone."""
    return directory / f"unable_{rank:05d}.txt"


def _note_if_unable(error: Exception, path: Path) -> None:
    """Write the reason why this rank could not be run alone; write nothing if its error is the trainer's own."""
    from harness.clusters import imagined, unable

    if reason := unable.why_unable(error, imagined.asked_codes):
        write_text(path, reason)


def _train_watched(
    case: Case, adapter: trainers.Adapter, this_rank: int, fault: str | None
) -> tuple[object, RankEvidence, StorageRecorder]:
    """Train one rank under the probe. Return the trainer, its evidence without samples, and the recorder of its storages.

    It changes torch for the rest of the process. fault: to put in first.
    """
    from harness.clusters import imagined, neighbours, world
    from harness.core.probe import Probe

    world.join_fake_world(this_rank, case.dims.world_size)
    neighbours.vote_alone()
    neighbours.answer_shapes(case)
    mode = imagined.prepare_torch()
    fired: list[bool] = []
    adapter.importable()
    if fault:
        rings.function_for("called", "load_fault")(fault).apply(lambda: fired.append(True))
    probe = Probe(this_rank, case.dims.world_size, row_length=functools.partial(_row_length, case))
    probe.install()
    try:
        with probe.watching_without_memory(mode) as witness:
            imagined.silence_propagation(witness)
            trainer = adapter.dry(case)
            probe.attach(trainer.model_parts)
            trainer.train(case.steps[-1])
            probe.finish_training()
            evidence = probe.evidence({}, fault=bool(fired) if fault else None)
    finally:
        probe.remove()
    evidence = dataclasses.replace(evidence, steps=tuple(map(_without_samples, evidence.steps)))
    return trainer, evidence_in_reference_names(evidence, adapter, case, probe.fused_starts), witness.storages


def _without_samples(step: StepEvidence) -> StepEvidence:
    """Return a step's evidence without the fields that depend on data or time."""
    return dataclasses.replace(step, microbatches=(), positions=(), lr=None, seconds=None)


def _row_length(case: Case, step: int) -> int:
    """Return the tokens of a row on one rank of cp in this step."""
    return case.seq_len(step) // case.dims.cp
