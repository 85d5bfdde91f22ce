"""Loading the one case of a name, without reading more files than need be."""

from __future__ import annotations

import os
from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all, load_files
from harness.core.evidence.reading import read_bytes


def load_case_named(name: str, folder: Path) -> Case:
    """Return the case of that name. Raises CaseError if no file has it, with the nearest names, or if a file that is
    read is wrong.

    Reading all files takes as long as judging a case, so only files that contain the name are read. If none does, all
    are read: the names of a cross product are written nowhere.
    """
    candidates = [path for path in sorted(folder.glob("*.yaml")) if _may_contain(path, name)]
    cases = [case for case in load_files(candidates) if case.name == name]
    return cases[0] if cases else find_case(name, load_all(folder))


def _may_contain(path: Path, name: str) -> bool:
    """Return whether a file contains the name. True if it cannot be read, which is for load_cases to refuse."""
    try:
        return os.fsencode(name) in read_bytes(path)
    except OSError:
        return True
