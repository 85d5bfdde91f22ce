"""The case of a name, without reading more than need be."""

from __future__ import annotations

import os
from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all, of_files
from harness.core.evidence.reading import read_bytes


def load_one(name: str, folder: Path) -> Case:
    """The case of that name. Raises CaseError.

    Reading all files takes as long as judging a case, so only files that contain the name are read. If none does, all are
    read: the names of a cross product are written nowhere.
    """
    written = [path for path in sorted(folder.glob("*.yaml")) if _may_hold(path, name)]
    found = [case for case in of_files(written) if case.name == name]
    return found[0] if found else find_case(name, load_all(folder))


def _may_hold(path: Path, name: str) -> bool:
    """What cannot be read is for load_cases to refuse."""
    try:
        return os.fsencode(name) in read_bytes(path)
    except OSError:
        return True
