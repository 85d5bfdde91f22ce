"""The folder of a case's checkpoints, for a trainer that needs it before it is built: a script takes it as an argument."""

from __future__ import annotations

import os
from pathlib import Path

VARIABLE = "HARNESS_CHECKPOINTS"


def folder() -> Path:
    """Return the folder in which all launches of this case leave and find their checkpoints.

    Raises ValueError if this process is no rank of a launch.
    """
    if VARIABLE not in os.environ:
        raise ValueError(f"{VARIABLE} is not set: only a rank that the harness launched has a folder of checkpoints")
    return Path(os.environ[VARIABLE])


def tell(folder: Path) -> None:
    """Set the folder of checkpoints for this process."""
    os.environ[VARIABLE] = str(folder)
