"""The functions of the trainer's repository that a rank runs, on disk once the rank has come to its end."""

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
    """Write which functions the rank runs in the block. A rank that raises leaves nothing.

    options: record_functions_of, the repository; directory, of the evidence.
    """
    recorder = FunctionRecorder(Path(options["record_functions_of"]))
    recorder.start()
    yield
    write_text(functions_file(Path(options["directory"]), rank), json.dumps(recorder.stop()))


def functions_file(directory: Path, rank: int) -> Path:
    """Return the file with the functions of the trainer's repository that a rank ran."""
    return evidence_file(directory, rank).with_suffix(".functions.json")
