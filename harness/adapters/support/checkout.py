"""Imports from a trainer's source other than the installed one: a checkout, or the folder of a release (an adapter's `of`)."""

from __future__ import annotations

import sys
from pathlib import Path


def put_first(folder: str | None) -> None:
    """Put the folder first in sys.path. None changes nothing: the installed one is imported."""
    if folder and sys.path[0] != folder:
        sys.path.insert(0, folder)


def must_lie_in(module: str, folder: str | None) -> None:
    """Raise ImportError if a loaded module was imported from outside the folder: a verdict would be of another version.

    folder: None allows any.
    """
    file = Path(sys.modules[module].__dict__["__file__"]).resolve()
    if folder and not file.is_relative_to(Path(folder).resolve()):
        raise ImportError(f"{module} was imported from {file.parent} before {folder} was to be found")
