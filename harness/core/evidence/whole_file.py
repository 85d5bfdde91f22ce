"""Writing of a file complete or not at all, also when the machine stops in between."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def open_whole_file(path: Path) -> Iterator[BinaryIO]:
    """Open a file to write it: under another name, flushed to disk and renamed when the block ends.

    Raises OSError. If anything is raised, the path is as it was before, and no other file is left.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(partial, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
