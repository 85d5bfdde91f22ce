"""What a recorded job really ran, on one page."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core.case import layout as spec
from harness.core.cli.answer import print_or_keep_document
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst_code
from harness.core.cli.parsing import BadInput
from harness.core.cli.work.options import refuse_json
from harness.core.cli.work.verdict_codes import exit_code_of_verdict
from harness.core.evidence.recording import load_record, record_file
from harness.core.evidence.text import count_text
from harness.core.judge.result import verdict_of_all
from harness.core.report.output import print_error, print_lines
from harness.recording.cli.forms import CHROME
from harness.recording.cli.work.trace_report import write_times
from harness.recording.judged.anomalies import results_of_anomalies
from harness.recording.judged.recorded_layout import judge_recording
from harness.recording.judged.stored_recording import Recording, load_recording
from harness.recording.pages.recording_documents import recording_document as document_of
from harness.recording.pages.recording_layout import jobs_report, results_of
from harness.recording.pages.recording_page import anomalies_text, recording_text
from harness.recording.traces.export import export_traces
from harness.recording.traces.timeline import timeline_of_records


@dataclass(frozen=True)
class RecordingAnswer:
    """What a command answers about one recording."""

    kind: str
    """Of its document."""
    document: Callable[[], dict[str, Any]]
    text: str
    code: int
    """The exit code that follows from it."""


def show_recording(
    args: argparse.Namespace,
    directory: Path,
    layout: str | None,
    *,
    whole: bool = False,
    file: Path | None = None,
    ended: bool = True,
) -> int:
    """Print what a recorded job ran, judged by the layout if one is given. Return the exit code.

    file: of a page for a browser, in place of text. ended: whether the job was not interrupted; if it was, no layout is judged.
    Raises EvidenceError and CaseError.
    """
    recording = load_recording(directory)
    about = about_recording(recording, layout, whole=whole, ended=ended)
    _print_answer(args, file, recording, about)
    return about.code


def about_recording(
    recording: Recording, layout: str | None, *, whole: bool = False, ended: bool = True
) -> RecordingAnswer:
    """Return the answer on a recording: its kind, its document, its text and the exit code.

    It is judged if a layout is given, ranks left summaries and the job was not interrupted (`ended`). Raises EvidenceError
    and CaseError.
    """
    if layout is None or not recording.summaries or not ended:
        text = recording_text(recording, layout=layout or "", whole=whole)
        return RecordingAnswer(
            "recording", lambda: document_of(recording, with_layout=layout is not None), text, exit_code(recording)
        )
    dims = spec.parse_layout(layout, recording.world)
    jobs = [judge_recording(job, dims) for job in recording.jobs]
    text = recording_text(recording, jobs_report(dims, jobs), layout=layout, whole=whole)
    code = worst_code([exit_code_of_verdict(verdict_of_all(results_of(jobs))), exit_code(recording)])
    return RecordingAnswer("layout", lambda: document_of(recording, dims, jobs), text, code)


def about_anomalies(recording: Recording) -> RecordingAnswer:
    """Return what is anomalous in it, whatever was requested: empty text if nothing is, or if only the recorder failed."""
    code = exit_code(recording)
    if code != BROKEN:
        return RecordingAnswer("recording", lambda: document_of(recording), "", PASSED)
    return RecordingAnswer("recording", lambda: document_of(recording), anomalies_text(recording), code)


def _print_answer(args: argparse.Namespace, html: Path | None, recording: Recording, about: RecordingAnswer) -> None:
    """Print the answer, or write it as a page with one step drawn."""
    if html is None:
        print_or_keep_document(args, about.kind, about.document, about.text)
        return
    refuse_json(args, "--html")
    records = {rank: load_record(record_file(recording.directory, rank)) for rank in recording.summaries}
    write_times(html, f"recording {recording.directory}", about.text, timeline_of_records(records), kernels=False)


def export_recording(args: argparse.Namespace, directory: Path) -> int:
    """Write traces of all ranks into DIRECTORY/chrome; return 2 where some collective has no time. Raises EvidenceError."""
    refuse_json(args, f"--as {CHROME}")
    if args.layout or args.all:
        raise BadInput(f"--as {CHROME}: leave out --layout and --all")
    files, untimed = export_traces(load_recording(directory), directory / CHROME)
    for file in files:
        print_lines(file)
    if untimed or not files:
        print_error(
            f"{count_text(untimed, 'collective')} without a time: an older version recorded them, or nothing saw the call"
        )
    return NOT_JUDGED if untimed or not files else PASSED


def exit_code(recording: Recording) -> int:
    """Return 1 for an anomaly that no job intends, and 2 for evidence that is missing or cannot be read."""
    return exit_code_of_verdict(verdict_of_all(results_of_anomalies(recording)))
