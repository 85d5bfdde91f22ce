"""What the traces of two jobs can be compared in: what ran over which ranks, traffic, step time and exposed communication."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from harness.core.evidence.text import counted
from harness.recording.judged.figures import EXPOSED, Figure, Figures, by_name, figures
from harness.recording.judged.outside_passes import SECTION
from harness.recording.judged.structure import structure
from harness.recording.traces.job import TracedJob
from harness.recording.traces.times import exposed_by_step

SEEN = ("ranks", "axes", SECTION, "idle groups")
"""What traces show of a structure."""
NEEDED = ("structure", "uses", "members", "groups")


def of_both(one: TracedJob, other: TracedJob) -> tuple[TracedJob, TracedJob]:
    """Return both jobs of the ranks that both have traces of, unless the jobs have other numbers of ranks."""
    both = one.ranks.keys() & other.ranks.keys()
    if one.recording.world != other.recording.world or not both:
        return one, other
    return _of(one, both), _of(other, both)


def _of(job: TracedJob, ranks: set[int]) -> TracedJob:
    summaries = {rank: found for rank, found in job.recording.summaries.items() if rank in ranks}
    some = {rank: found for rank, found in job.ranks.items() if rank in ranks}
    return replace(job, ranks=some, recording=replace(job.recording, summaries=summaries))


def not_compared(one: TracedJob, other: TracedJob) -> list[str]:
    """Say what of either job was not seen."""
    lacking = [job.recording.provides.lacking for job in (one, other)]
    lacks = {of[word].why for of in lacking for word in NEEDED if word in of}
    some = dict.fromkeys(
        f"{len(job.ranks)} of {counted(job.recording.world, 'rank')}"
        for job in (one, other)
        if len(job.ranks) < job.recording.world
    )
    return [f"not compared: {why}" for why in sorted(lacks)] + [f"compared: {text}" for text in some]


def traced_structure(job: TracedJob) -> Mapping[str, Any]:
    """Return the structure, as far as traces show one: empty without a step that all ranks traced."""
    found = structure(job.recording) if job.numbers else {}
    listed = all(one.trace.groups is not None for one in job.ranks.values())
    return {key: found[key] for key in SEEN if key in found and (listed or key != "idle groups")}


def traced_figures(job: TracedJob) -> Figures:
    """Return the figures of a job. A trace's first step is like the others."""
    if not job.numbers:
        return {}
    exposed = [
        Figure(EXPOSED, f"{op} in {phase}, over {size} ranks", steps)
        for (size, op, phase), steps in exposed_by_step(job).items()
    ]
    return {**figures(job.recording, warm=True), **by_name(exposed)}
