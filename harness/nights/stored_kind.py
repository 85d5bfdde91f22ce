"""What is stored in a place: evidence of cases, a run of a matrix, a recording, or the runs of many nights."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path

from harness.core.evidence.store import CASE_FILE, EvidenceError
from harness.core.run import verdicts
from harness.recording.judged.stored_recording import STARTED, holds_recording
from harness.recording.traces.files import DUMP, TRACE, files_of


class Kind(StrEnum):
    """A kind of stored things, in words for a message."""

    CASES = "evidence of a case"
    RUN = "a run's verdicts"
    RECORDING = "a recording"
    HISTORY = "the verdicts of several runs"
    TRACES = "profiler traces"
    DUMPS = "Flight Recorder dumps"


def kind_of(place: Path) -> Kind:
    """Return what is stored in a file or folder.

    What lies in a folder itself decides. If nothing does, the folders below are searched.
    Raises EvidenceError for a place with nothing or with two kinds.
    """
    if not place.exists():
        raise EvidenceError(f"{place}: no such file or folder")
    found = _in_itself(place) or _below(place)
    if not found:
        raise EvidenceError(
            f"{place}: it holds no case's evidence, no run's verdicts, no recording, no traces and no dumps"
            f"{_near(place)}"
        )
    if len(found) > 1:
        both = " and ".join(f"{kind} ({path})" for kind, path in found.items())
        raise EvidenceError(f"{place}: it holds {both}; name one of them")
    return next(iter(found))


def _in_itself(place: Path) -> dict[Kind, Path]:
    """Return the kinds of what lies in the place itself, each with a file."""
    run = verdicts.file_in(place)
    found = {Kind.CASES: place / CASE_FILE} if (place / CASE_FILE).exists() else {}
    found |= {Kind.RUN: run} if run else {}
    found |= {Kind.RECORDING: place} if holds_recording(place) else {}
    for kind, name in ((Kind.TRACES, TRACE), (Kind.DUMPS, DUMP)) if not found else ():
        found |= dict.fromkeys([kind] if (files := files_of(place, name)) else [], files[0] if files else place)
    return found


def _below(place: Path) -> dict[Kind, Path]:
    """Return the kinds of what lies in its folders, each with one of them. A single recording is named, not searched for."""
    case, run = next(place.glob(f"*/{CASE_FILE}"), None), next(place.rglob(verdicts.FILE), None)
    return ({Kind.CASES: case.parent} if case else {}) | ({Kind.HISTORY: run} if run else {})


def _near(place: Path) -> str:
    """Return a remedy for who named the folder around a recording."""
    recording = next(place.glob(f"*/{STARTED}"), None)
    return f"; {recording.parent} is a recording" if recording else ""
