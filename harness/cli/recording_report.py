"""What a recorded job really ran, on one page."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.answer import answer
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, worst
from harness.judge.result import Verdict
from harness.judge.stored_recording import Recording, load_recording
from harness.report.layout_documents import recording as document_of
from harness.report.recording_layout import jobs_report, results_of, verdict_of_all
from harness.report.recording_odd import OF_RECORDER, odd
from harness.report.recording_page import page
from harness.run.recorded_layout import judged
from harness.spec import layout as spec


def add_layout(parser: Any) -> None:
    parser.add_argument(
        "--layout",
        metavar="DEGREES",
        help=f"judge it by what was requested: dp_replicate=2,dp_shard=8, or {spec.FILES}",
    )


def shown(args: argparse.Namespace, directory: Path, layout: str | None, *, whole: bool = False) -> int:
    """Raises EvidenceError and CaseError."""
    recording = load_recording(directory)
    if layout is None or not recording.summaries:
        answer(args, "recording", lambda: document_of(recording), page(recording, whole=whole))
        return exit_code(recording)
    dims = spec.layout(layout, recording.world)
    jobs = [judged(job, dims) for job in recording.jobs]
    text = page(recording, jobs_report(dims, jobs), layout=layout, whole=whole)
    answer(args, "layout", lambda: document_of(recording, dims, jobs), text)
    found = {Verdict.FAIL: BROKEN, Verdict.PASS: PASSED}.get(verdict_of_all(results_of(jobs)), NOT_JUDGED)
    return worst([found, exit_code(recording)])


def exit_code(recording: Recording) -> int:
    """Return 1 for an anomaly that no job intends, and 2 for evidence that is missing or cannot be read."""
    if not recording.summaries:
        return NOT_JUDGED
    labels = {label for label, _ in odd(recording)}
    if labels - OF_RECORDER or recording.code:
        return BROKEN
    return NOT_JUDGED if labels else PASSED
