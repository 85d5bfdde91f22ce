"""Traces of a job, judged by the layout that somebody says it has; without one, by what holds of every layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.request import neighbours
from harness.core.checks import judge
from harness.core.evidence.recording import RankRecord
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.recording.judged.recorded import trial_of
from harness.recording.judged.recorded_layout import ResultsAndDiagnosis
from harness.recording.traces.job import TracedJob

ALWAYS = ("collective_order",)
"""Checks that no layout changes."""


def judge_traces(job: TracedJob, dims: ParallelDims | None) -> ResultsAndDiagnosis:
    """Return what checks say of traces, and the diagnosis of what fails, None if nothing does.

    Without dims only the checks of ALWAYS are returned. A cause is proven by the ranks of which there are traces.
    """
    world = job.recording.world
    trial = _trial_of_traces(job, dims or ParallelDims(dp_replicate=world))
    results = judge(trial)
    if dims is None:
        results = tuple(result for result in results if result.check in ALWAYS)
    suspects = (neighbours,) if dims is not None and dims.world_size == world else ()
    seen = replace(trial, run=replace(trial.run, provided=replace(trial.run.provided, partly={})))
    failed = any(result.verdict is Verdict.FAIL for result in results)
    return results, diagnose(seen, judge(seen), suspects, ()) if failed else None


def _trial_of_traces(job: TracedJob, dims: ParallelDims) -> Trial:
    """Return the trial of the traced ranks for this layout."""
    records: Mapping[int, RankRecord] = job.records
    where = str(job.recording.directory)
    return trial_of(records, dims, where, job.recording.world, recording=job.recording)
