"""The commit of sources: those of the harness, or those of a trainer."""

from __future__ import annotations

from pathlib import Path

from harness import BUILTIN, ROOT
from harness.core.evidence.git import run_git


def commit_of_harness() -> str:
    """Return the commit of the checkout, or of the archive that an installed harness was built from; empty if unknown.

    An installed harness never asks git: the folder around it may be another repository.
    """
    if BUILTIN == ROOT and (commit := commit_of(str(ROOT))):
        return commit
    archived = (ROOT / "harness" / "commit.txt").read_text(encoding="ascii").strip()
    return "" if archived.startswith("$") else archived


def commit_of(source: str) -> str:
    """Return the commit that is checked out around a path, with "-dirty" if files were changed since; empty if git has
    none.

    Empty for a release that pip installed into OUT, too: it is not of the commit around it.
    """
    if ".environments" in Path(source).parts:
        return ""
    try:
        return run_git(source, "describe", "--always", "--dirty", "--exclude=*").stdout.strip()
    except OSError:
        return ""
