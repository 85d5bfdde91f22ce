"""Page on the traces of a job: what ran over which ranks, in which step, and what the traces do not say."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.core.case.case import Case
from harness.core.case.dims import ParallelDims
from harness.core.evidence.keys import steps_text
from harness.core.evidence.text import count_text, some_ranks_text
from harness.core.judge.result import Result, verdict_of_all
from harness.core.report.text import Rows
from harness.recording.pages.recording_layout import layout_report
from harness.recording.pages.recording_page import rows_of_axes, rows_of_step, wrapped_table
from harness.recording.pages.trace_times import time_rows
from harness.recording.traces.job import TracedJob
from harness.recording.traces.kineto import operators_text
from harness.recording.traces.times import Times


def trace_page(
    job: TracedJob, judged: Sequence[str], times: Times | None, case: Case | None = None, gpu: str = ""
) -> str:
    """Return the page of a job's traces as text.

    judged: the lines on what checks say. times: None where traces have no kernels of collectives. case: the plan, where
    one is known. gpu: whose links are compared, in words; empty for none.
    """
    recording = job.recording
    title = f"{recording.directory}: traces of {len(job.ranks)} of {recording.world} ranks"
    return "\n".join(
        [*judged, "", title, *wrapped_table([*trace_rows(job), *(time_rows(times, case, gpu) if times else [])])]
    )


def trace_rows(job: TracedJob) -> Rows:
    """Return the rows on missing traces, steps, what ran in them, and collectives without a group or outside of steps."""
    summaries = [summary for _, summary in sorted(job.recording.summaries.items())]
    missing = sorted({*range(job.recording.world)} - job.ranks.keys())
    rows: Rows = [("no trace", f"of {some_ranks_text(missing)}")] if missing else []
    rows.append(("steps", _steps_text(job)))
    nameless = list(itertools.chain.from_iterable(traced_rank.nameless for traced_rank in job.ranks.values()))
    if job.step_numbers:
        rows += rows_of_axes(summaries) if nameless else rows_of_step(summaries)
    if nameless:
        rows.append(("no group", f"is named of {operators_text(nameless)}"))
    if beside := sum(traced_rank.calls_left_out for traced_rank in job.ranks.values()):
        rows.append(("left out", f"{count_text(beside, 'collective')} of other threads or outside of these steps"))
    return rows


def _steps_text(job: TracedJob) -> str:
    """Return how many steps all ranks traced, and their numbers in the traces; or that there is none."""
    if not job.step_numbers:
        return "none that all ranks traced from its beginning to its end"
    named = steps_text(job.step_numbers).replace("step", "ProfilerStep")
    return f"{count_text(len(job.step_numbers), 'step')} ({named} of the traces)"


def report_without_layout(results: Sequence[Result]) -> list[str]:
    """Return the report of what holds of every layout."""
    report = layout_report(ParallelDims(), results, None)
    return [f"{verdict_of_all(results)} order of collectives; --layout has groups judged as well", *report[1:]]
