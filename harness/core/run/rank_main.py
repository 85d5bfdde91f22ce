"""Entries of the processes that a launch starts: run the trainer under the probe and leave evidence, or run the reference.

All are entries for harness.core.launch and take plain options, so that local and torchrun ranks do exactly the same.
What they return is kept until the process ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from harness.core import rings, trainers
from harness.core.case.case import Case
from harness.core.case.loading import from_json
from harness.core.evidence import relies_on
from harness.core.evidence.format import version_of
from harness.core.evidence.fused import Block, blocks_in_order, split_fused, split_fused_checkpoint
from harness.core.evidence.names import with_reference_names
from harness.core.evidence.records import Collective, RankEvidence
from harness.core.evidence.store import CHECKPOINT_FILE, evidence_file, save_stored, write_text
from harness.core.evidence.whole_file import open_whole_file
from harness.core.launch import inflight
from harness.core.run.exports import read_export
from harness.core.trainers import StartedTrainer
from harness.core.trainers.support import checkpoints as checkpoints_of_case
from harness.core.trainers.support.names import with_tied_output

if TYPE_CHECKING:
    from harness.core.probe import Probe

version_of(RankEvidence)  # worked out, and kept, before ranks are forked: a hundredth of what each of them does

EXPORT = "export"
SHAPES_FILE = "parameters.json"  # of a model that does not fit: {name of the trainer's: shape}


def rank(options: dict[str, Any]) -> StartedTrainer:
    """Run the trainer under the probe, as `train_under_probe` does, and return it. Raises CannotStart if torch lacks what the
    probe needs.

    A ring may bring wrappers, which run around the rank if the options have their key.
    """
    import torch  # noqa: F401

    _refuse_lacking_torch()
    with contextlib.ExitStack() as around:
        for key, wrapper in rings.entries_of("rank_wrappers").items():
            if key in options:
                around.enter_context(rings.import_object(wrapper)(options, int(os.environ.get("RANK", 0))))
        return train_under_probe(options)


def train_under_probe(options: dict[str, Any]) -> StartedTrainer:
    """Run the trainer under the probe and store the evidence of this rank; return the trainer.

    options: case, trainer, weights, device, fault ("FILE.py:NAME" or None), directory (of the evidence), checkpoints,
    compile_cache (a directory, or None), launch (its id).

    What a launch writes into checkpoints the next one continues from; both happen while the probe watches.
    Trap: the trainer must not be freed. Its destructor may wait, holding the GIL, for a thread of gloo that wants the GIL.
    """
    from harness.core.probe import Probe
    from harness.core.probe.settings import settings_before_the_trainer

    settings = settings_before_the_trainer()
    case = from_json(options["case"])
    adapter = trainers.load_adapter(options["trainer"])
    checkpoints = Path(options["checkpoints"])
    rank = int(os.environ.get("RANK", 0))
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    checkpoints_of_case.tell(checkpoints)
    _share_compiled_code(options.get("compile_cache"))
    with trainers.raising_cannot_start(options["trainer"]):
        adapter.importable()
    _refuse_lacking_torch()  # of the modules, too, that the trainer imports
    fired_calls = _apply_fault(options, rank)
    row_length = functools.partial(_row_length, case)
    probe = Probe(rank, world_size, on_issue=_inflight_recorder(), row_length=row_length, settings=settings)
    probe.install()
    try:
        trainer = _start_trainer(adapter, case, options)
        probe.attach(trainer.model_parts)
        if case.resume:
            trainer.resume(checkpoints)
            probe.note_resume(case.steps.start - 1)
        started_file(Path(options["directory"]), rank).touch()
        train_and_write(trainer, case, options, probe)
        reported = {
            metrics.step: (metrics.loss, metrics.grad_norm, metrics.lr, metrics.largest) for metrics in trainer.metrics
        }
        evidence = probe.evidence(
            reported, bool(fired_calls) if options.get("fault") else None, _reported_numbers(trainer)
        )
        launch_facts = {"reports": getattr(trainer, "reports", adapter.reports), "launch": options.get("launch", "")}
        evidence = dataclasses.replace(
            evidence_in_reference_names(evidence, adapter, case, probe.fused_starts), **launch_facts
        )
    finally:
        probe.remove()
    save_stored(evidence_file(Path(options["directory"]), rank), _with_exported_tensors(evidence, case, options))
    adapter.stop()
    return trainer


def _refuse_lacking_torch() -> None:
    """Raise CannotStart if torch lacks what the probe relies on."""
    if missing := relies_on.lacking_for_probe():
        raise trainers.CannotStart(missing)


def _reported_numbers(trainer: StartedTrainer) -> dict[int, Mapping[str, trainers.Number]]:
    """Return the numbers that the trainer reports beside loss, norm and rate, by step and by name."""
    return {metrics.step: metrics.numbers for metrics in trainer.metrics}


def evidence_in_reference_names(
    evidence: RankEvidence, adapter: trainers.Adapter, case: Case, starts: Mapping[str, int]
) -> RankEvidence:
    """Return the evidence with the reference's names, fused tensors separated, and what the adapter says of its reports
    and switches.

    starts: by the trainer's name of a fused tensor, the element at which this rank's interval begins.
    """
    with_adapter_facts = dataclasses.replace(
        evidence,
        reports=adapter.reports,
        reports_every=adapter.reports_every,
        settings=evidence.settings | dict(adapter.settings),
    )
    fqn = with_tied_output(case, adapter.fqn)
    starts_by_fqn = {fqn(name): start for name, start in starts.items()}
    return split_fused(with_reference_names(with_adapter_facts, fqn), _fused_blocks(adapter, case), starts_by_fqn)


def _fused_blocks(adapter: trainers.Adapter, case: Case) -> dict[str, tuple[Block, ...]]:
    """Return the blocks of rows of each fused tensor, by the name that the adapter gives it; empty if nothing is fused."""
    rows = {fqn: shape[0] for fqn, shape in case.model.parameter_shapes().items()}
    return {name: blocks_in_order(parts, rows) for name, parts in adapter.fused(case).items()}


def _start_trainer(adapter: trainers.Adapter, case: Case, options: dict[str, Any]) -> StartedTrainer:
    """Start the trainer and return it. Raises CannotStart if a module is missing.

    If parameters do not fit the seed weights, rank 0 writes the model's shapes into SHAPES_FILE before the error is
    raised.
    """
    try:
        with trainers.raising_cannot_start(options["trainer"]):
            return adapter.start(case, Path(options["weights"]), options["device"])
    except ValueError as error:
        if hasattr(error, "shapes") and int(os.environ.get("RANK", 0)) == 0:
            write_text(Path(options["directory"]) / SHAPES_FILE, json.dumps(error.shapes))
        raise


def train_and_write(trainer: StartedTrainer, case: Case, options: dict[str, Any], probe: Probe | None = None) -> None:
    """Train all steps of the launch and save the checkpoint that it leaves, if any: after the last step, or on the way.
    Then export.

    Without a probe nothing is exported. What `save` returns may be a future of what is written in the background; the
    launch waits for it at its end.
    """
    saved_step = case.saved_step
    last_step = case.steps[-1]
    checkpoints = Path(options["checkpoints"])
    pending = []
    if saved_step is not None and saved_step < last_step:
        trainer.train(saved_step)
        with probe.saving_checkpoint() if probe else contextlib.nullcontext():
            pending.append(trainer.save(checkpoints))
    trainer.train(last_step)
    if probe:
        probe.finish_training()
    if saved_step == last_step or case.cut_short:
        pending.append(trainer.save(checkpoints))
    for pending_save in pending:
        if hasattr(pending_save, "result"):
            pending_save.result()
    if probe:
        _export_model(trainer, case, options)


def _export_model(trainer: StartedTrainer, case: Case, options: dict[str, Any]) -> None:
    """Export the model of the last launch, if the case requests it, and wait until every rank is done: then it is
    complete."""
    if case.features.export and case.last_step is None:
        import torch.distributed as dist

        trainer.export(Path(options["directory"]) / EXPORT)
        if dist.is_initialized():
            dist.barrier()


def _with_exported_tensors(evidence: RankEvidence, case: Case, options: dict[str, Any]) -> RankEvidence:
    """Return the evidence; of rank 0 with the exported tensors, if the case requests an export.

    Rank 0 deletes the export.
    """
    folder = Path(options["directory"]) / EXPORT
    if not case.features.export or case.last_step is not None or evidence.rank != 0:
        return evidence
    exported = read_export(folder)
    shutil.rmtree(folder, ignore_errors=True)
    return dataclasses.replace(evidence, exported=exported)


def _row_length(case: Case, step: int) -> int:
    return case.seq_len(step) // case.dims.cp


def started_file(directory: Path, rank: int) -> Path:
    """Return the path of a rank's .started file, and make its folder. The rank makes the file before its first step."""
    path = evidence_file(directory, rank)
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.with_suffix(".started")


def run_reference(options: dict[str, Any]) -> None:
    """Run the reference; leave reference.npz and weights.npz in the directory.

    options: case, directory, device, noise (keys to measure)."""
    from harness.reference.train import train

    case = from_json(options["case"])
    directory = Path(options["directory"])
    trained = train(case.model, case.training, options["device"], noise=options["noise"], model_of=case.model_of)
    with open_whole_file(directory / "weights.npz") as file:
        np.savez(file, **trained.weights)  # type: ignore[arg-type]
    save_stored(directory / "reference.npz", trained)


def store_checkpoint_tensors(options: dict[str, Any]) -> None:
    """Read the latest checkpoint, in a process that trains nothing, and leave checkpoint.npz.

    Options as of `train_under_probe`.
    """
    from harness.core.evidence.checkpoint_index import TIED_OUTPUT_FQN, read_checkpoint_index

    case = from_json(options["case"])
    adapter = trainers.load_adapter(options["trainer"])
    fused = _fused_blocks(adapter, case)
    checkpoint_tensors = read_checkpoint_index(
        Path(options["checkpoints"]), {*case.model.parameter_shapes(), TIED_OUTPUT_FQN, *fused}, adapter.fqn
    )
    save_stored(Path(options["directory"]) / CHECKPOINT_FILE, split_fused_checkpoint(checkpoint_tensors, fused))


def run_unwatched(options: dict[str, Any]) -> StartedTrainer:
    """Run the trainer without the probe, as a user does, and return it. Options as of `train_under_probe`.

    Rank 0 leaves the losses that it reports in losses.json, as pairs of step and loss.
    """
    case = from_json(options["case"])
    adapter = trainers.load_adapter(options["trainer"])
    rank = int(os.environ.get("RANK", 0))
    directory = Path(options["directory"])
    checkpoints_of_case.tell(Path(options["checkpoints"]))
    _share_compiled_code(options.get("compile_cache"))
    with trainers.raising_cannot_start(options["trainer"]):
        adapter.importable()
    _apply_fault(options, rank)
    trainer = _start_trainer(adapter, case, options)
    if case.resume:
        trainer.resume(Path(options["checkpoints"]))
    train_and_write(trainer, case, options)
    if rank == 0:
        write_text(directory / "losses.json", json.dumps([(metrics.step, metrics.loss) for metrics in trainer.metrics]))
    adapter.stop()
    return trainer


def _apply_fault(options: dict[str, Any], rank: int) -> list[bool]:
    """Apply the fault, if the options name one. Return a list to which an entry is added each time that the fault's
    code runs.

    The first time a file RANK.fired appears, too, for a rank that dies of it.
    """
    fired_calls: list[bool] = []
    fired_file = evidence_file(Path(options["directory"]), rank).with_suffix(".fired")

    def note() -> None:
        if not fired_calls:
            fired_file.parent.mkdir(parents=True, exist_ok=True)
            fired_file.touch()
        fired_calls.append(True)

    if options.get("fault"):
        rings.function_for("called", "load_fault")(options["fault"]).apply(note)
    return fired_calls


def _share_compiled_code(folder: str | None) -> None:
    """Set torch to keep compiled code in a folder, where the next ranks and cases find it; None changes nothing.

    One thread compiles: the default is a pool of processes a rank.
    """
    if folder is not None:
        from torch._inductor import config

        os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        config.compile_threads = 1


def _inflight_recorder() -> Callable[[Collective], None]:
    """Return a function that records a collective before it is issued, so that a hang can be explained from outside.

    It does nothing where the launch keeps no such record.
    """
    record = inflight.current_inflight()

    def note(call: Collective) -> None:
        if record is not None:
            record.issue(
                call.group,
                call.ranks,
                call.seq,
                call.op,
                call.bytes,
                call.step,
                call.phase,
                call.peer,
                call.root,
                call.dtype,
            )

    return note
