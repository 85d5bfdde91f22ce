"""Which files are profiler traces, and which are Flight Recorder dumps: a look at the beginning of each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from harness.core.evidence.store import EvidenceError
from harness.recording.traces.stream import opened

TRACE = "trace"
DUMP = "dump"
ENDS = (".json", ".json.gz")
_OF_TRACE = re.compile(rb'"(traceEvents|schemaVersion|deviceProperties|distributedInfo|ph)"\s*:')
_OF_DUMP = re.compile(rb'"(entries|pg_status|pg_config|comm_lib_version|nccl_version)"\s*:')


def kind_of_file(path: Path) -> str:
    """Return TRACE or DUMP; empty for another file, also one that cannot be read."""
    try:
        with opened(path) as file:
            begin = file.read(4096)
    except EvidenceError:
        return TRACE if path.name.endswith(ENDS) else ""
    if begin[:1] == b"\x80" and begin[1:2] <= b"\x05":
        return DUMP
    if begin.lstrip()[:1] not in (b"{", b"["):
        return TRACE if path.name.endswith((".trace.json", ".json.gz")) else ""
    if _OF_TRACE.search(begin):
        return TRACE
    return DUMP if _OF_DUMP.search(begin) else ""


def files_of(path: Path, kind: str) -> list[Path]:
    """Return the files of that kind in a folder, or such a file itself."""
    if not path.is_dir():
        return [path] if kind_of_file(path) == kind else []
    return [file for file in sorted(path.iterdir()) if file.is_file() and kind_of_file(file) == kind]


def all_files(paths: Sequence[Path], kind: str) -> list[Path]:
    """Return the files of all these places, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(files_of(path, kind) for path in paths)))
