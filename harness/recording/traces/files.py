"""Finder of profiler traces and Flight Recorder dumps among files, by the first bytes of each."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path

from harness.core.evidence.store import EvidenceError
from harness.recording.traces.stream import open_trace

TRACE = "trace"
DUMP = "dump"
TRACE_SUFFIXES = (".json", ".json.gz")
_TRACE_KEYS = re.compile(rb'"(traceEvents|schemaVersion|deviceProperties|distributedInfo|ph)"\s*:')
_DUMP_KEYS = re.compile(rb'"(entries|pg_status|pg_config|comm_lib_version|nccl_version)"\s*:')


def kind_of_file(path: Path) -> str:
    """Return TRACE or DUMP; "" for another file.

    A file that cannot be read, or is damaged at its beginning, counts as a trace if its name is one of a trace.
    """
    try:
        with open_trace(path) as file:
            begin = file.read(4096)
    except EvidenceError:
        return TRACE if path.name.endswith(TRACE_SUFFIXES) else ""
    if begin[:1] == b"\x80" and begin[1:2] <= b"\x05":
        return DUMP
    if begin.lstrip()[:1] not in (b"{", b"["):
        return TRACE if path.name.endswith((".trace.json", ".json.gz")) else ""
    if _TRACE_KEYS.search(begin):
        return TRACE
    return DUMP if _DUMP_KEYS.search(begin) else ""


def files_of_kind(path: Path, kind: str) -> list[Path]:
    """Return the files of that kind in a folder, without its subfolders, sorted; or the path itself if it is such a
    file.

    Empty if there is none.
    """
    if not path.is_dir():
        return [path] if kind_of_file(path) == kind else []
    return [file for file in sorted(path.iterdir()) if file.is_file() and kind_of_file(file) == kind]


def files_of_paths(paths: Sequence[Path], kind: str) -> list[Path]:
    """Return the files of all these places, each once."""
    return list(dict.fromkeys(itertools.chain.from_iterable(files_of_kind(path, kind) for path in paths)))
