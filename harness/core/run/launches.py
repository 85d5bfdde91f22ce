"""The launches of a case: its ranks, those of the launches it resumes from, and the reading of their checkpoints."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import shlex
import time
import uuid
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from harness.core import trainers
from harness.core.case import case_files
from harness.core.case.case import Case, CaseError, to_json
from harness.core.case.trainer_repository import repository_of
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.own_folders import list_trainer_files
from harness.core.evidence.reading import read_json
from harness.core.evidence.records import Run
from harness.core.evidence.store import save_run
from harness.core.launch import Exit, Job, launch
from harness.core.run import communication
from harness.core.run.commit import commit_of, commit_of_harness
from harness.core.run.options import Options
from harness.core.run.reference_cache import reference_folder
from harness.core.run.sources import digest_of_run

RANK_ENTRY = "harness.core.run.rank_main:rank"
CHECKPOINT = "checkpoint"
UNWATCHED_ENTRY = "harness.core.run.rank_main:run_unwatched"
CHECKPOINT_ENTRY = "harness.core.run.rank_main:store_checkpoint_tensors"
COMPILER_MODULES = ("torch._inductor.compile_fx",)  # 500 modules, half a second for each rank
EIGHT_BIT_MODULES = (
    "torchao.float8",
    "torchao.prototype.moe_training.mxfp8_linear",
    "torch._inductor.codegen.triton",  # torchao patches it, whether anything is compiled or not
)  # 900 modules, a second and more for each rank
COMPILE_TIMEOUT_FACTOR = 5  # times the time limit, for ranks that have to compile before their first step ends


class Stopwatch:
    """A stopwatch for the seconds in which ranks had their slots; starting it again leaves out the wait for them."""

    def __init__(self) -> None:
        self.start()

    def start(self) -> None:
        self.began = time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.began


def launch_all(case: Case, folder: Path, weights: Path, options: Options, stage: Callable[[str], None]) -> None:
    """Run all launches of a case, and its repeat, one after the other; each leaves its evidence in a folder of its name.

    After an earlier launch that failed, none is started, for it would have nothing to resume from. What the trainer
    itself wrote is listed at the end, so that a later run can tell it from a user's files.
    """
    try:
        _launch_each(case, folder, weights, options, stage)
    finally:
        list_trainer_files(folder)


def _launch_each(case: Case, folder: Path, weights: Path, options: Options, stage: Callable[[str], None]) -> None:
    """Run the launches in order, calling `stage` with a title before each.

    For a launch after an earlier one that failed, store that all its ranks are lost.
    """
    launches = case.launches | ({"repeat": case} if case.runs > 1 else {})
    failed_launch = ""
    for number, (name, launched) in enumerate(launches.items(), 1):
        title = f"{launched.dims.world_size} ranks"
        if len(launches) > 1:
            title += f", launch {number} of {len(launches)}"
        stage(title)
        if failed_launch:
            exits = tuple(
                Exit(rank, "lost", error=f"not started: {failed_launch} failed")
                for rank in range(launched.dims.world_size)
            )
            save_run(
                Run(
                    str(folder / name),
                    launched.dims.world_size,
                    exits,
                    {},
                    fault=options.fault,
                    trainer=options.trainer,
                    made=describe_origin(case, options),
                )
            )
        elif not launch_and_save(launched, folder / name, weights, options) and launched.last_step is not None:
            failed_launch = name


def measure_reported_losses(case: Case, options: Options, folder: Path, *, steps: int) -> tuple[float, ...]:
    """Return the losses that rank 0 reports in the last steps of a longer run of the case without the probe.

    The run is resumed like the case. If two launches train a step, the first one's loss counts; of one that starts from weights
    alone, its own count. Empty if a rank failed."""
    last_step = max(steps, case.training.steps) if case.resume and case.resume[-1].after >= steps else steps
    longer = replace(case, training=replace(case.training, steps=last_step))
    weights = reference_folder(case.first_launch, options) / "weights.npz"
    losses: dict[int, float] = {}
    for name, launched in longer.launches.items():
        exits = _launch_ranks(launched, folder / name, weights, options, entry=UNWATCHED_ENTRY)
        if any(exit.how != "ok" for exit in exits):
            return ()
        before = losses if launched.model_of is None else {}
        losses = dict(read_json(folder / name / "losses.json")) | before
    return tuple(losses[step] for step in sorted(losses)[-steps:])


def launch_and_save(case: Case, folder: Path, weights: Path, options: Options) -> bool:
    """Launch a case's ranks and store how they ended in run.json; return whether all ended well.

    If they did, and the launch saved a checkpoint, another process reads it into the launch's folder. A checkpoint that
    is to be cut short is damaged before.
    """
    watch = Stopwatch()
    made = {"launch": uuid.uuid4().hex[:12], **describe_origin(case, options)}
    exits = _launch_ranks(case, folder, weights, options, entry=RANK_ENTRY, watch=watch, launch_id=made["launch"])
    run = Run(
        str(folder),
        case.dims.world_size,
        tuple(exits),
        {},
        seconds=watch.seconds(),
        fault=options.fault,
        trainer=options.trainer,
        made=made,
    )
    save_run(run)
    ended_well = all(exit.how == "ok" for exit in exits)
    if ended_well and case.cut_short:
        interrupt_checkpoint(folder.with_name(CHECKPOINT))
    if ended_well and case.saved_step is not None:
        launch(Job(folder / CHECKPOINT, 1, CHECKPOINT_ENTRY, _entry_options(case, folder, weights, options)))
    return ended_well


def interrupt_checkpoint(checkpoints: Path) -> None:
    """Make the latest checkpoint one that a crash interrupted: its files are empty, and its index is missing.

    Torch's format writes the index last. Raises CaseError where there is none.
    """
    indices = sorted(checkpoints.rglob(".metadata"), key=lambda path: path.stat().st_mtime)
    if not indices:
        raise CaseError(f"{checkpoints}: no index (.metadata), so cut_short cannot interrupt a save; leave it out")
    indices[-1].unlink()
    for file in indices[-1].parent.rglob("*"):
        if file.is_file():
            os.truncate(file, 0)


def describe_origin(case: Case, options: Options) -> dict[str, str]:
    """Return where and how a run is made, by key, as Run.made keeps it: start, versions, device, launcher, options,
    replacements.

    Keys that do not apply are absent.
    """
    replacements = [
        *trainers.load_adapter(options.trainer).replaced(case, options.device),
        *communication.replacement_notes(options),
    ]
    return {
        "started": datetime.now(UTC).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "torch": importlib.metadata.version("torch"),
        "commit": commit_of_trainer(options.trainer),
        "device": options.device,
        **({"backend": communication.backend_of(options)} if options.device == "cuda" else {}),
        **({"ranks-per-gpu": str(options.ranks_per_gpu)} if options.ranks_per_gpu > 1 else {}),
        "launcher": options.launcher,
        **_typed_options(case, options),
        "sources": digest_of_run(options),
        **({"replaced": "\n".join(replacements)} if replacements else {}),
    }


def _typed_options(case: Case, options: Options) -> dict[str, str]:
    """Return the other options that a command needs to run the case like this again, by key; those that are usual are
    left out."""
    default_options = Options()
    options_typed = {"timeout": f"{options.timeout:g}"} if options.timeout != default_options.timeout else {}
    options_typed |= {"torchrun-args": shlex.join(options.torchrun_args)} if options.torchrun_args else {}
    if not case.file and options.cases:  # a case with a file has its folder
        options_typed |= {"cases": str(case_files.folder_of(options.cases))}
    return options_typed


def commit_of_trainer(spec: str) -> str:
    """Return the commit of the repository that the trainer under test is in; the harness's for a trainer that comes
    with it.

    Empty if it is in none.
    """
    trainer = TrainerSpec.parse(spec)
    outside = trainer.is_file or trainer.source
    return commit_of(trainer.source or str(Path(trainer.name).parent)) if outside else commit_of_harness()


def _entry_options(case: Case, folder: Path, weights: Path, options: Options) -> dict[str, object]:
    """Return the options that rank_main's entries take, by key.

    All values are plain, so that they can be sent to a process.
    """
    return {
        "case": to_json(case),
        "trainer": options.trainer,
        "weights": str(weights.resolve()),
        "device": options.device,
        "fault": options.fault,
        "compile_cache": _compile_cache(case, options.out) if case.features.compile else None,
        "directory": str(folder.resolve()),
        "checkpoints": str(folder.resolve().with_name(CHECKPOINT)),
        **({"record_functions_of": str(repository_of(options.trainer))} if options.map else {}),
    }


def _compile_cache(case: Case, out: Path) -> str:
    """Return the folder of compiled code, which cases with the same features share.

    torch's keys do not contain all that a trainer chooses while a graph is traced, as
    upstream_bugs/compile_cache_ignores_cp_rotation.py shows.
    """
    features = hashlib.sha256(repr(case.features).encode()).hexdigest()[:12]
    return str((out / ".inductor" / features).resolve())


def slots_for(case: Case, options: Options) -> int | None:
    """Return how many slots a launch takes of this machine; None for as many as it has ranks here.

    On GPUs these are GPUs; on CPU 0 for ranks that only wait for their time limit.
    """
    if options.device == "cuda":
        return None if options.torchrun_args else communication.gpus_needed(case.dims.world_size, options)
    return 0 if options.waits else None


def _launch_ranks(
    case: Case,
    folder: Path,
    weights: Path,
    options: Options,
    *,
    entry: str,
    watch: Stopwatch | None = None,
    launch_id: str = "",
) -> list[Exit]:
    """Start a case's ranks with this entry, wait for them, and return how each ended. watch: restarted when they have
    their slots.

    Where a case compiles, the time limit is COMPILE_TIMEOUT_FACTOR times as long.
    """
    timeout = options.timeout * (COMPILE_TIMEOUT_FACTOR if case.features.compile else 1)
    job = Job(
        folder,
        case.dims.world_size,
        entry,
        _entry_options(case, folder, weights, options) | {"launch": launch_id},
        timeout=timeout,
        device=options.device,
        group_timeout=max(10.0, timeout / 2),
        torchrun_args=options.torchrun_args,
        slots=slots_for(case, options),
        env=communication.communication_environment(options, case),
        ranks_per_gpu=options.ranks_per_gpu,
        preload=_modules_to_preload(case, options),
    )
    return launch(job, options.launcher, began=watch.start if watch else lambda: None)


def _modules_to_preload(case: Case, options: Options) -> tuple[str, ...]:
    """Return the modules that each rank would import, so that their server imports them once."""
    modules = trainers.load_adapter(options.trainer).preload
    if case.training.quantize:
        modules = modules + EIGHT_BIT_MODULES
    if case.features.compile:
        modules = modules + COMPILER_MODULES
    return modules
