"""The kind of what is stored in a place: evidence of cases, a run, a recording, or the runs of many nights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from harness.core.evidence.store import CASE_FILE, EvidenceError
from harness.core.run import verdicts
from harness.recording.judged.stored_recording import STARTED, holds_recording
from harness.recording.traces.files import DUMP, TRACE, files_of_kind


class StoredKind(StrEnum):
    """A kind of stored things, in words for a message."""

    CASES = "evidence of a case"
    RUN = "a run's verdicts"
    RECORDING = "a recording"
    HISTORY = "the verdicts of several runs"
    TRACES = "profiler traces"
    DUMPS = "Flight Recorder dumps"


def stored_kind_of(path: Path) -> StoredKind:
    """Return what is stored in a file or folder.

    What lies in a folder itself decides. If nothing does, the folders below are searched.
    Raises EvidenceError for a place with nothing or with two kinds.
    """
    if not path.exists():
        raise EvidenceError(f"{path}: no such file or folder")
    kinds = _kinds_in_itself(path) or _kinds_below(path)
    if not kinds:
        raise EvidenceError(
            f"{path}: holds nothing that can be shown; give a folder that `harness run`, `matrix`, `nightly` or `record`"
            " wrote, or one with profiler traces or Flight Recorder dumps"
            f"{_nearby_recording_text(path)}"
        )
    if len(kinds) > 1:
        kinds_text = " and ".join(f"{kind} ({file})" for kind, file in kinds.items())
        raise EvidenceError(f"{path}: holds {kinds_text}; give the path of one of them")
    return next(iter(kinds))


def _kinds_in_itself(path: Path) -> dict[StoredKind, Path]:
    """Return the kinds of what lies in the place itself, each with a file."""
    kinds: dict[StoredKind, Path] = {}
    if (path / CASE_FILE).exists():
        kinds[StoredKind.CASES] = path / CASE_FILE
    if run := verdicts.verdicts_file_in(path):
        kinds[StoredKind.RUN] = run
    if holds_recording(path):
        kinds[StoredKind.RECORDING] = path
    if kinds:
        return kinds
    for kind, name in ((StoredKind.TRACES, TRACE), (StoredKind.DUMPS, DUMP)):
        if files := files_of_kind(path, name):
            kinds[kind] = files[0]
    return kinds


def _kinds_below(path: Path) -> dict[StoredKind, Path]:
    """Return the kinds of what lies in its folders, each with one of them. A single recording is named, not searched for."""
    kinds: dict[StoredKind, Path] = {}
    case = next(path.glob(f"*/{CASE_FILE}"), None)
    run = next(path.rglob(verdicts.VERDICTS_FILE), None)
    if case:
        kinds[StoredKind.CASES] = case.parent
    if run:
        kinds[StoredKind.HISTORY] = run
    return kinds


def _nearby_recording_text(path: Path) -> str:
    """Return a remedy for who named the folder around a recording."""
    recording = next(path.glob(f"*/{STARTED}"), None)
    return f"; {recording.parent} is a recording" if recording else ""
