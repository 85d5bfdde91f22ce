"""What profiler traces and Flight Recorder dumps of a job show."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from harness.cli.answer import answer
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.judge.result import Verdict
from harness.report.hang_page import hang_document, hang_page
from harness.report.layout_documents import traces as document_of
from harness.report.recording_layout import layout_report, verdict_of_all
from harness.report.trace_page import always_report, trace_page
from harness.run.traced import judged
from harness.spec import layout as spec
from harness.traces.analyzer import analysis_of
from harness.traces.dumps import load_dumps
from harness.traces.files import DUMP, TRACE, all_files
from harness.traces.hang import hang_of
from harness.traces.job import job_of
from harness.traces.kineto import load_trace
from harness.traces.times import times_of

OF = {Verdict.FAIL: BROKEN, Verdict.PASS: PASSED, Verdict.UNKNOWN: NOT_JUDGED}


def shown(args: argparse.Namespace, places: Sequence[Path], layout: str | None) -> int:
    """Raises EvidenceError and CaseError."""
    job = job_of([load_trace(file) for file in all_files(places, TRACE)])
    dims = spec.layout(layout, job.recording.world) if layout else None
    results, diagnosis = judged(job, dims)
    times = times_of(job)
    text = layout_report(dims, results, diagnosis) if dims else always_report(results)
    answer(args, "traces", lambda: document_of(job, dims, (results, diagnosis), times), trace_page(job, text, times))
    return OF.get(verdict_of_all(results), NOT_JUDGED)


def shown_dumps(args: argparse.Namespace, places: Sequence[Path]) -> int:
    """Raises EvidenceError."""
    dumps = load_dumps(all_files(places, DUMP))
    hang, said, where = hang_of(dumps), analysis_of(dumps), places[0] if len(places) == 1 else dumps[0].path.parent
    answer(args, "dumps", lambda: hang_document(hang, said, where), hang_page(hang, said, where))
    return OF[hang.verdict]
