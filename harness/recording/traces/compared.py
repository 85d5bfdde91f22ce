"""Structure and figures in which the traces of two jobs can be compared: groups, traffic, step time, exposed communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.core.evidence.text import count_text
from harness.recording.judged.figures import EXPOSED, Figure, Figures, figures_by_name, figures_of_recording
from harness.recording.judged.outside_passes import SECTION
from harness.recording.judged.structure import structure
from harness.recording.traces.job import TracedJob
from harness.recording.traces.times import exposed_by_step

TRACED_SECTIONS = ("ranks", "axes", SECTION, "idle groups")
"""What traces show of a structure."""
NEEDED_EVIDENCE = ("structure", "uses", "members", "groups")


def with_common_ranks(first_job: TracedJob, second_job: TracedJob) -> tuple[TracedJob, TracedJob]:
    """Return both jobs with only the ranks that both have traces of.

    They stay as they are if the jobs have other numbers of ranks, or no traced rank in common.
    """
    common_ranks = first_job.ranks.keys() & second_job.ranks.keys()
    if first_job.recording.world != second_job.recording.world or not common_ranks:
        return first_job, second_job
    return _with_ranks(first_job, common_ranks), _with_ranks(second_job, common_ranks)


def _with_ranks(job: TracedJob, ranks: set[int]) -> TracedJob:
    """Return the job with the traces and summaries of these ranks only. Its records stay."""
    summaries = {rank: summary for rank, summary in job.recording.summaries.items() if rank in ranks}
    traced_ranks = {rank: traced_rank for rank, traced_rank in job.ranks.items() if rank in ranks}
    return replace(job, ranks=traced_ranks, recording=replace(job.recording, summaries=summaries))


def not_compared_texts(first_job: TracedJob, second_job: TracedJob) -> list[str]:
    """Return lines on what the traces of either job do not show, each once; empty if they show all.

    "not compared: WHY" for each lacking kind of NEEDED_EVIDENCE, sorted. Then "compared: 2 of 8 ranks" for a job without
    traces of all ranks.
    """
    reasons = set[str]()
    for job in (first_job, second_job):
        lacking = job.recording.provides.lacking
        reasons.update(lacking[word].why for word in NEEDED_EVIDENCE if word in lacking)
    partial_texts = dict.fromkeys(
        f"{len(job.ranks)} of {count_text(job.recording.world, 'rank')}"
        for job in (first_job, second_job)
        if len(job.ranks) < job.recording.world
    )
    return [f"not compared: {why}" for why in sorted(reasons)] + [f"compared: {text}" for text in partial_texts]


def traced_structure(job: TracedJob) -> Mapping[str, Any]:
    """Return the sections of a structure that traces show, by name. Empty without a step that all ranks traced.

    Idle groups are left out if some trace lists no groups.
    """
    all_sections = structure(job.recording) if job.step_numbers else {}
    lists_groups = all(traced_rank.trace.groups is not None for traced_rank in job.ranks.values())
    return {
        key: all_sections[key]
        for key in TRACED_SECTIONS
        if key in all_sections and (lists_groups or key != "idle groups")
    }


def traced_figures(job: TracedJob) -> Figures:
    """Return the figures of a job by (kind, name). Empty without a step that all ranks traced.

    A trace's first step counts as the others do.
    """
    if not job.step_numbers:
        return {}
    exposed = [
        Figure(EXPOSED, f"{op} in {phase}, over {size} ranks", steps)
        for (size, op, phase), steps in exposed_by_step(job).items()
    ]
    return {**figures_of_recording(job.recording, warm=True), **figures_by_name(exposed)}
