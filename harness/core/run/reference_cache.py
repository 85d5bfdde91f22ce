"""The reference on one device, computed once for a recipe and kept."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from harness import ROOT
from harness.core import trainers
from harness.core.case.case import Case, to_json
from harness.core.evidence.format import version_of
from harness.core.evidence.own_folders import REFERENCE_FOLDER, empty_own_folder
from harness.core.evidence.reading import read_json
from harness.core.evidence.store import EvidenceError, write_text
from harness.core.judge import golden
from harness.core.launch import Exit, Job, launch, machine, reference_slot_pool
from harness.core.run.locks import exclusive_lock
from harness.core.run.options import Options
from harness.core.run.reference_memory import reason_not_fitting_now
from harness.reference.kernels import cpu_kind, has_same_noise
from harness.reference.record import ReferenceRun

REFERENCE_ENTRY = "harness.core.run.rank_main:run_reference"
FILES = ("reference.npz", "weights.npz")
WHOLE = "whole.json"
REFERENCE_PACKAGES = ("torch", "numpy", "torchao")  # what the reference's numbers depend on, beside its sources


def link_or_copy(source: Path, target: Path) -> None:
    """Make a hard link at `target`, so that ten cases of one recipe share one file; a copy if the file system has no
    links."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copyfile(source, target)


def reference_folder(case: Case, options: Options, noise: Sequence[str] | None = None) -> Path:
    """Return the folder of the recipe's reference, with reference.npz and weights.npz, computed now if it was not or is
    damaged.

    It is keyed by recipe, sources, versions and kind of processor. noise: what to measure in addition, by
    TrainerTraits.noise_key; None: what this case needs and no golden holds. Raises EvidenceError if the reference fails
    or does not fit into memory.
    """
    noise = noise_to_measure(case, options) if noise is None else noise
    noise_suffix = "".join(f"-{key.replace(' ', '-')}" for key in noise)
    device = "cpu" if options.device == "cpu" else f"{options.device}-{machine.gpu_model()}"
    folder = options.out / ".reference" / f"{golden.recipe_name(case)}-{reference_key(case)}-{device}{noise_suffix}"
    with exclusive_lock(folder.with_suffix(".lock")):
        if not is_undamaged(folder):
            _launch_reference(case, folder, options, noise)
    return folder


def noise_to_measure(case: Case, options: Options) -> tuple[str, ...]:
    """Return the key of the noise that this case needs and no golden holds; () if none has to be measured.

    A golden holds the noise of its recipe on the kind of CPU that made it. Another recipe, seed or device has its own,
    measured once. A case with exact bounds needs none.
    """
    is_known = case.has_derived_bounds or (options.device == "cpu" and _golden_has_noise(case, options))
    return () if is_known else (_noise_key(case, options),)


def takes_long(case: Case, options: Options) -> bool:
    """Return whether the case's reference takes many times as long as the usual one: it emulates 8 bits, or measures noise."""
    return bool(case.training.quantize) or bool(noise_to_measure(case, options))


def _noise_key(case: Case, options: Options) -> str:
    return trainers.traits_of(trainers.load_adapter(options.trainer), case).noise_key(case)


def _golden_has_noise(case: Case, options: Options) -> bool:
    """Return whether a golden holds the noise of this case, from the same kind of CPU.

    True for a case of a file even if the golden or its noise is missing: the check `golden` says what to do. A case of
    no file may have a recipe that has a golden all the same.
    """
    try:
        accepted = golden.load_golden(case)
    except golden.GoldenError:
        return bool(case.file)
    if not has_same_noise(accepted.environment.get("cpu", ""), cpu_kind()):
        return False
    noise = accepted.noise.get(_noise_key(case, options))
    return bool(case.file) or (noise is not None and set(noise.distance) == set(case.model.parameter_shapes()))


def reference_key(case: Case) -> str:
    """Return eight digits of all that the reference's numbers depend on beside the recipe: sources, versions,
    processor, data file."""
    digest = hashlib.sha256()
    for source in sorted((ROOT / "harness" / "reference").glob("*.py")):
        digest.update(source.read_bytes())
    digest.update(version_of(ReferenceRun).encode())
    digest.update(f"{package_versions()} {cpu_kind()}".encode())
    if case.training.data is not None and Path(case.training.data).exists():
        stat = Path(case.training.data).stat()
        digest.update(f"{stat.st_size} {stat.st_mtime_ns}".encode())
    return digest.hexdigest()[:8]


def package_versions() -> str:
    """Return the versions of torch, numpy and torchao, as one text."""
    return "".join(f"{package} {_package_version(package)}" for package in REFERENCE_PACKAGES)


def _package_version(package: str) -> str:
    """Return a package's version; empty where it is not installed: torchao is needed by recipes in 8 bits only."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _launch_reference(case: Case, folder: Path, options: Options, noise: Sequence[str]) -> None:
    """Run the reference in a process of its own and rename its folder when it is complete, in place of what was there.

    Raises EvidenceError if it does not fit into memory, or failed.
    """
    if reason := reason_not_fitting_now(case, options.device, noise=bool(noise)):
        raise EvidenceError(reason)
    partial_folder = folder.with_name(folder.name + ".partial")
    for stale_folder in (partial_folder, folder):
        empty_own_folder(stale_folder, REFERENCE_FOLDER).rmdir()
    options_of_entry = {
        "case": to_json(case),
        "directory": str(partial_folder.resolve()),
        "device": options.device,
        "noise": noise,
    }
    job = Job(
        partial_folder, 1, REFERENCE_ENTRY, options_of_entry, timeout=max(options.timeout, 600.0), device=options.device
    )
    (rank_exit,) = launch(job, pool=reference_slot_pool() if options.device == "cpu" else None)
    if rank_exit.how != "ok":
        raise EvidenceError(
            f"the reference run of case {case.name!r} failed, nothing can be judged: {failure_text(rank_exit)}"
        )
    write_text(partial_folder / WHOLE, json.dumps({name: file_state(partial_folder / name) for name in FILES}))
    partial_folder.rename(folder)


def is_undamaged(folder: Path) -> bool:
    """Return whether the folder is complete and its files have the size and time with which they were made.

    Case folders have links to them, so that damaging a file there damages the cache.
    """
    try:
        return all(file_state(folder / name) == state for name, state in read_json(folder / WHOLE).items())
    except (OSError, ValueError, AttributeError):
        return False


def file_state(file: Path) -> list[int]:
    """Return the size of a file in bytes, and when it was last written, in nanoseconds. Both change when its bytes do."""
    status = file.stat()
    return [status.st_size, status.st_mtime_ns]


def failure_text(rank_exit: Exit) -> str:
    """Return why a process failed: its error and stack, or for SIGKILL that memory may have run out, and the remedy."""
    if rank_exit.how == "signal" and rank_exit.signal == "SIGKILL":
        return "it was killed by SIGKILL, as the kernel does when memory runs out; request a smaller model or batch"
    return f"{rank_exit.error or rank_exit.signal}\n{rank_exit.stack}".rstrip()
