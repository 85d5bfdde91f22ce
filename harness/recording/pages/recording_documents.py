"""Data of documents on a recording, on traces, and on what checks say of either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from harness.core.case.dims import ParallelDims
from harness.core.judge.result import Diagnosis, Result, verdict_of_all
from harness.core.report.as_data import as_data
from harness.core.report.cause_text import diagnosis_line
from harness.recording.judged.anomalies import find_anomalies
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import costs, structure
from harness.recording.pages.recording_layout import JudgedJob, results_of
from harness.recording.pages.recording_page import fact_rows
from harness.recording.pages.trace_page import trace_rows
from harness.recording.traces.job import TracedJob
from harness.recording.traces.times import Times


def verdict_document(results: Sequence[Result], diagnosis: Diagnosis | None) -> dict[str, Any]:
    """Return the fields on checks: the verdict of all results, the cause as a sentence, the results and the diagnosis."""
    return {
        "verdict": verdict_of_all(results),
        "cause": diagnosis_line(diagnosis),
        "results": results,
        "diagnosis": diagnosis,
    }


def recording_document(
    recording: Recording, dims: ParallelDims | None = None, jobs: Sequence[JudgedJob] = (), *, with_layout: bool = False
) -> dict[str, Any]:
    """Return the document of a recording: anomalies, what ran, in words and as structure, costs, jobs and the trainer's
    own groups.

    jobs: results and diagnosis of each job, where a layout was declared; the fields on checks are those of the first,
    the verdict that of all. with_layout: whether one was declared, and is not judged yet. Facts and structure are empty
    if no rank left evidence.
    """
    summaries = [summary for _, summary in sorted(recording.summaries.items())]
    rows = fact_rows(recording, summaries, with_layout=with_layout or dims is not None) if summaries else []
    own_groups: list[dict[str, Any]] = []
    for summary in summaries:
        own_groups += [as_data(group) | {"rank": summary.rank} for group in summary.groups.own]
    judged_fields: dict[str, Any] = {}
    if jobs:
        judged_fields = {"layout": dims, **verdict_document(*jobs[0]), "verdict": verdict_of_all(results_of(jobs))}
    return {
        "directory": recording.directory,
        "command": recording.command,
        "code": recording.code,
        "world": recording.world,
        "left_evidence": list(recording.summaries),
        "exits": recording.exits,
        "unreadable": recording.unreadable,
        "odd": find_anomalies(recording),
        "facts": [{"label": label, "text": text} for label, text in rows],
        "structure": structure(recording) if summaries else {},
        "costs": costs(recording),
        "own_groups": own_groups,
        "jobs": [_job_document(job, *jobs[number : number + 1]) for number, job in enumerate(recording.jobs)],
        **judged_fields,
    }


def traces_document(
    job: TracedJob, dims: ParallelDims | None, results_and_diagnosis: JudgedJob, times: Times | None
) -> dict[str, Any]:
    """Return the document of traces: ranks and steps on record, what ran, and what checks say of it.

    Layout and times are left out where there are none.
    """
    optional_fields: dict[str, Any] = ({"layout": dims} if dims else {}) | ({"times": times} if times else {})
    return {
        "directory": job.recording.directory,
        "world": job.recording.world,
        "traced": list(job.ranks),
        "steps": job.step_numbers,
        "facts": [{"label": label, "text": text} for label, text in trace_rows(job)],
        **optional_fields,
        **verdict_document(*results_and_diagnosis),
    }


def _job_document(job: Recording, *judged_jobs: JudgedJob) -> dict[str, Any]:
    """Return the data on one of several jobs. judged_jobs: its results and diagnosis, or nothing where no layout was
    declared."""
    return {
        "directory": job.directory,
        "name": job.job,
        "world": job.world,
        "left_evidence": list(job.summaries),
        "steps": max((summary.progress.steps_seen for summary in job.summaries.values()), default=0),
        "ended": {rank: summary.progress.ended or "unheard" for rank, summary in job.summaries.items()},
        **(verdict_document(*judged_jobs[0]) if judged_jobs else {}),
    }
