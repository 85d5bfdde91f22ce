"""The traces of a job on a page: what ran over which ranks, in which step, and what the traces do not say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.evidence.keys import steps_text
from harness.core.evidence.text import counted, some_ranks
from harness.core.judge.result import Result, verdict_of_all
from harness.core.report.text import Rows
from harness.recording.pages.recording_layout import layout_report
from harness.recording.pages.recording_page import rows_of_axes, rows_of_step, table_of
from harness.recording.pages.trace_times import time_rows
from harness.recording.traces.job import TracedJob
from harness.recording.traces.kineto import operators_text
from harness.recording.traces.times import Times


def trace_page(
    job: TracedJob, judged: Sequence[str], times: Times | None, case: Case | None = None, gpu: str = ""
) -> str:
    """Return the page of a job's traces.

    judged: what checks say. times: None where traces have no kernels of collectives.
    """
    recording = job.recording
    title = f"{recording.directory}: traces of {len(job.ranks)} of {recording.world} ranks"
    return "\n".join(
        [*judged, "", title, *table_of([*trace_rows(job), *(time_rows(times, case, gpu) if times else [])])]
    )


def trace_rows(job: TracedJob) -> Rows:
    """Return the rows on what ran, and on what the traces lack."""
    summaries = [summary for _, summary in sorted(job.recording.summaries.items())]
    missing = sorted({*range(job.recording.world)} - job.ranks.keys())
    rows: Rows = [("no trace", f"of {some_ranks(missing)}")] if missing else []
    rows.append(("steps", _steps(job)))
    nameless = list(itertools.chain.from_iterable(traced_rank.nameless for traced_rank in job.ranks.values()))
    if job.numbers:
        rows += rows_of_axes(summaries) if nameless else rows_of_step(summaries)
    if nameless:
        rows.append(("no group", f"is named of {operators_text(nameless)}"))
    if beside := sum(traced_rank.beside for traced_rank in job.ranks.values()):
        rows.append(("left out", f"{counted(beside, 'collective')} of other threads or outside of these steps"))
    return rows


def _steps(job: TracedJob) -> str:
    if not job.numbers:
        return "none that all ranks traced from its beginning to its end"
    named = steps_text(job.numbers).replace("step", "ProfilerStep")
    return f"{counted(len(job.numbers), 'step')} ({named} of the traces)"


def always_report(results: Sequence[Result]) -> list[str]:
    """Return the report of what holds of every layout."""
    report = layout_report(ParallelDims(), results, None)
    return [f"{verdict_of_all(results)} order of collectives; --layout has groups judged as well", *report[1:]]
