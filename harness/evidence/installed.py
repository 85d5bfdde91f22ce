"""Which version of a package is installed."""

from __future__ import annotations

import importlib.metadata


def installed(package: str) -> str:
    """Return its version."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
