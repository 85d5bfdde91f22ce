"""The repository that holds a trainer's sources, and the commit that is checked out there."""

from __future__ import annotations

from pathlib import Path

from harness import BUILTIN, ROOT
from harness.core.case.case import CaseError
from harness.core.case.repository import repository_root
from harness.core.case.trainer_spec import TrainerSpec
from harness.core.evidence.git import run_git


def repository_of(spec: str) -> Path:
    """Return the root of the git repository that holds a trainer's sources. Raises CaseError if there is none.

    It is that of SOURCE, else that of FILE.py. For llama3 it is the harness's own, unless that is installed. Other
    names have none without a source.
    """
    trainer = TrainerSpec.parse(spec)
    if trainer.source or trainer.is_file:
        folder = Path(trainer.source) if trainer.source else Path(trainer.name).parent
        root = repository_root(folder.resolve())
    else:
        root = repository_root(ROOT) if BUILTIN == ROOT and spec == "llama3" else None
    if root is None:
        raise CaseError(f"{spec}: its sources are in no git repository, so what changed is not known; --source PATH")
    return root


def clean_commit(root: Path) -> str:
    """Return the hash of the commit that is checked out. Raises CaseError if there is none, or if tracked files differ
    from it.

    A map of which sources each case ran is valid for one commit only.
    """
    commit = run_git(root, "rev-parse", "--verify", "HEAD").stdout.strip()
    if not commit or run_git(root, "status", "--porcelain", "--untracked-files=no").stdout.strip():
        raise CaseError(f"{root}: has changes that are not committed; a map is of a commit: commit them or leave --map")
    return commit
