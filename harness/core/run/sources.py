"""Digests of the sources that a run is made by: the harness, its trainer and the reference, and what they compute with."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

from harness import ROOT
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.run.import_closure import files_run_by
from harness.core.run.options import Options
from harness.core.run.reference_cache import package_versions


@functools.cache
def digest_of_sources() -> str:
    """Return a digest of all sources of the harness and of package versions, as this process found them when it first
    asked.

    Equal sources have the same on every machine.
    """
    digest = hashlib.sha256()
    for path in sorted({*ROOT.glob("harness/**/*.py"), *ROOT.glob("harness/reference/*.py")}):
        digest.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    digest.update(f"{platform.python_version()} {package_versions()}".encode())
    return digest.hexdigest()


def digest_of_adapter(spec: str) -> str:
    """Return twelve digits of an adapter's file and of the Python files beside it; empty for an adapter of the harness.

    No commit says it: the file may be changed and not committed, or lie outside of git.
    """
    trainer = TrainerSpec.parse(spec)
    if not trainer.is_file:
        return ""
    digest = hashlib.sha256()
    for path in sorted(Path(trainer.name).resolve().parent.glob("*.py")):
        digest.update(f"{path.name}\n".encode() + (path.read_bytes() if path.is_file() else b""))
    return digest.hexdigest()[:12]


EVIDENCE_MADE_BY = (
    "harness.core.run.rank_main",  # what ranks run: the trainer's steps under the probe, and the reference
    "harness.core.run.launches",  # what decides a launch
    "harness.core.run.measuring",  # what is written once all ranks have ended
    "harness.core.trainers.llama3",  # which is loaded by its name
    "harness.faults.operators",  # what makes a fault, with the package that loads it
    "harness.nights.affected.in_rank",  # what runs around a rank that is mapped
)
"""Modules whose imports are all that can change a run's evidence. Checks, causes and reports are not among them."""


def digest_of_run(options: Options) -> str:
    """Return a text on all that a run's evidence depends on: a digest of what runs in its ranks, the fault included,
    and the machine.

    Empty for a trainer other than llama3: it is not known which of its sources a run used.
    """
    if options.trainer != "llama3":
        return ""
    return f"{digest_of_evidence_sources(options.fault or '')} {platform.node()}"


@functools.cache
def digest_of_evidence_sources(fault: str) -> str:
    """Return a digest of the sources that can change evidence, as this process found them when it first asked.

    fault: FILE.py:NAME as ranks load it, or empty. Files beside it count if it is not of the harness.
    """
    file = Path(fault.rpartition(":")[0]) if fault else None
    catalogue = file is not None and file.is_relative_to(ROOT / "harness")
    own = [".".join(file.relative_to(ROOT).with_suffix("").parts)] if file is not None and catalogue else []
    sha = hashlib.sha256()
    for path in files_run_by([*EVIDENCE_MADE_BY, *own]):
        sha.update(f"{path.relative_to(ROOT)}\n".encode() + path.read_bytes())
    if file is not None and not catalogue:
        for path in sorted(file.resolve().parent.glob("*.py")):
            sha.update(f"{path.name}\n".encode() + path.read_bytes())
    sha.update(f"{platform.python_version()} {package_versions()}".encode())
    return sha.hexdigest()
