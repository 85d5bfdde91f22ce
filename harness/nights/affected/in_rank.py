"""The record of the repository's functions that a rank runs, written once the rank has come to its end."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from harness.core.evidence.store import evidence_file, write_text
from harness.nights.affected.recorder import FunctionRecorder


@contextlib.contextmanager
def recording_functions(options: dict[str, Any], rank: int) -> Iterator[None]:
    """Record the functions that run in the block, then write them as JSON beside the rank's evidence.

    Nothing is written after an exception. options: "record_functions_of" is the root of the repository, "directory" the
    folder of the evidence.
    """
    recorder = FunctionRecorder(Path(options["record_functions_of"]))
    recorder.start()
    yield
    write_text(functions_file(Path(options["directory"]), rank), json.dumps(recorder.stop()))


def functions_file(directory: Path, rank: int) -> Path:
    """Return the path of the file with the functions that a rank ran. directory: of the launch's evidence."""
    return evidence_file(directory, rank).with_suffix(".functions.json")
