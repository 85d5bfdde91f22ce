"""The kind of what is stored in a place: evidence of cases, a run, a recording, traces, dumps, or the runs of many nights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from harness.core.evidence.store import CASE_FILE, EvidenceError
from harness.core.run import verdicts
from harness.recording.judged.stored_recording import STARTED, holds_recording
from harness.recording.traces.files import DUMP, TRACE, files_of_kind


class StoredKind(StrEnum):
    """A kind of stored things. The value is the words for it in a message."""

    CASES = "evidence of a case"
    RUN = "a run's verdicts"
    RECORDING = "a recording"
    HISTORY = "the verdicts of several runs"
    TRACES = "profiler traces"
    DUMPS = "Flight Recorder dumps"


def stored_kind_of(path: Path) -> StoredKind:
    """Return what is stored in a file or folder.

    What lies in the folder itself decides; only if that is nothing, the folders below are searched. Raises
    EvidenceError if the path does not exist, holds nothing that is known, or holds two kinds.
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
    """Return the kinds that lie in the place itself, each with a file or folder that shows it. Empty if there is none.

    Traces and dumps count only if there is no evidence, run or recording.
    """
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
    """Return the kinds that lie in folders below, each with one example: evidence of cases, or runs of many nights.

    A single recording below is not looked for: a person has to name its folder.
    """
    kinds: dict[StoredKind, Path] = {}
    case = next(path.glob(f"*/{CASE_FILE}"), None)
    run = next(path.rglob(verdicts.VERDICTS_FILE), None)
    if case:
        kinds[StoredKind.CASES] = case.parent
    if run:
        kinds[StoredKind.HISTORY] = run
    return kinds


def _nearby_recording_text(path: Path) -> str:
    """Return "; FOLDER is a recording" for a recording in a folder just below, as a remedy in a message.

    Empty if there is none.
    """
    recording = next(path.glob(f"*/{STARTED}"), None)
    return f"; {recording.parent} is a recording" if recording else ""
