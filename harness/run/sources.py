"""Which sources a run is of: those of the harness, its trainer and the reference, and what they compute with."""

from __future__ import annotations

import functools
import hashlib
import platform
from pathlib import Path

from harness import ROOT
from harness.run.options import Options
from harness.run.reference_cache import package_versions
from harness.spec.trainer_spec import TrainerSpec


@functools.cache
def sources_anywhere() -> str:
    """Return a digest as this process found them when it first launched anything; it is the same on every machine."""
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


def digest(options: Options) -> str:
    """Empty for a trainer whose sources are elsewhere: it is not known which of them a run used."""
    return f"{sources_anywhere()} {platform.node()}" if options.trainer == "llama3" else ""
