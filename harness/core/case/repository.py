"""The git repository around a folder: its root, its name, and paths as they are typed in it."""

from __future__ import annotations

import os
from pathlib import Path

from harness.core.evidence.git import run_git


def repository_root(folder: Path) -> Path | None:
    """Return the nearest folder, this one or one above it, that has .git. None outside of a repository."""
    folder = folder.absolute()
    return next((above for above in (folder, *folder.parents) if (above / ".git").exists()), None)


def repository_name_here() -> str:
    """Return "NAME/FOLDER": the repository's name, and the current folder inside it. Empty outside of a repository.

    The name is that of the remote origin, or the root folder's if there is no remote.
    """
    current_folder = Path.cwd()
    root = repository_root(current_folder)
    if root is None:
        return ""
    try:
        remote = run_git(root, "config", "--get", "remote.origin.url").stdout.strip()
    except OSError:
        remote = ""
    name = remote.rstrip("/").replace(":", "/").rpartition("/")[2].removesuffix(".git") or root.name
    return "/".join([name, *current_folder.relative_to(root).parts])


def path_from_here(path: str | Path) -> str:
    """Return an absolute path relative to the current folder, if both lie in one repository or the path lies below that
    folder.

    Any other path is returned unchanged.
    """
    path = Path(path)
    current_folder = Path.cwd()
    if not path.is_absolute():
        return str(path)
    root = repository_root(current_folder) or current_folder
    return os.path.relpath(path, current_folder) if path.is_relative_to(root) else str(path)
