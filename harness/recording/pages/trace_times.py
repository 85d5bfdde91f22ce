"""The rows of a page of traces on time: what collectives took, what was hidden, who was waited for, and a drawing of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.case.case import Case
from harness.core.evidence.text import bytes_text, counted, some_ranks
from harness.core.plan.figures.pipeline_time import matmul_operations, pipeline_time
from harness.core.report.text import Rows
from harness.recording.pages.recording_page import groups_text
from harness.recording.traces.times import RankTime, Times, Took

MOST = 8
WHEN = {"other": "between passes", "optimizer": "in the optimizer's step"}
BAR = 40
"""Letters of a drawn step."""


def time_rows(times: Times, case: Case | None = None, gpu: str = "") -> Rows:
    """Return what is exposed most first. All times are of a step and a rank, on average. case: the plan, where one is known.
    gpu: whose links are compared, in words."""
    rows: Rows = [("time", f"{_text(times.step)} a step, of which on each rank:")]
    shown = sorted(times.ranks, key=lambda rank: times.ranks[rank].computes)
    shown = shown if len(shown) <= MOST else [*shown[: MOST // 2], *shown[-MOST // 2 :]]
    rows += [("", f"  {_bar(times.ranks[rank], times.step)} rank {rank}") for rank in sorted(shown)]
    rows.append(("", "  # computes, = only a collective runs, . no kernel runs"))
    for label, part in (("computes", "computes"), ("only collectives", "exposed"), ("no kernel", "idle")):
        rows.append(("", f"  {label}: {_range({rank: getattr(one, part) for rank, one in times.ranks.items()})}"))
    rows += [("collectives" if not place else "", _took(one)) for place, one in enumerate(times.took[:MOST])]
    rows += [("", f"  .. and {len(times.took) - MOST} more kinds")] * (len(times.took) > MOST)
    if gpu and any(one.link for one in times.took):
        rows.append(("links", f"by the data sheet of {gpu}, filled in the order of ranks"))
    rows += [("bubble", _bubble(times, case))] if case is not None and case.dims.pp > 1 else []
    return [*rows, ("waited for", _late(times))]


def _bubble(times: Times, case: Case) -> str:
    """Say what the schedule leaves idle beside what was seen, which holds more than the bubble."""
    planned = pipeline_time(case, lambda stage: matmul_operations(case, stage)).bubble
    busiest = max(times.ranks, key=lambda rank: times.ranks[rank].computes)
    computes = times.ranks[busiest].computes
    how = f"{case.features.schedule}, {counted(case.microbatches, 'microbatch').replace('batchs', 'batches')}"
    plan = f"planned {100 * planned:.3g} % of what the busiest rank computes ({how}, {counted(case.n_stages, 'stage')})"
    if not computes:
        return f"{plan}; no rank computes in these traces"
    rest = 100 * (times.step - computes) / computes
    seen = f"rank {busiest} does not compute for {rest:.3g} % of that"
    return f"{plan}; seen: {seen}, with all exposed communication and every other idle time in it"


def _range(of: Mapping[int, float]) -> str:
    least, most = min(of, key=lambda rank: of[rank]), max(of, key=lambda rank: of[rank])
    if _text(of[least]) == _text(of[most]):
        return _text(of[most])
    return f"{_text(of[least])} (rank {least}) to {_text(of[most])} (rank {most})"


def _took(one: Took) -> str:
    what = f"{one.op} {WHEN.get(one.phase, f'in {one.phase}')} over {groups_text(one.groups, 2)}"
    text = f"{what}: {_text(one.seconds)}, exposed {_text(one.exposed)}"
    of = f", {100 * one.rate / one.link:.3g} % of {bytes_text(one.link)}/s" if one.link else ""
    if one.waited is None:
        return f"{text}; at least {bytes_text(one.rate)}/s over a link{of}"
    return f"{text}, waited {_text(one.waited)}; {bytes_text(one.rate)}/s over a link{of}"


def _late(times: Times) -> str:
    """Say which rank came last to collectives, by how long the others waited for it."""
    if not times.compared:
        return "not known: no collective has the kernels of all its members"
    total = sum(one.caused for one in times.ranks.values())
    worst = max(times.ranks, key=lambda rank: times.ranks[rank].caused)
    most = times.ranks[worst].caused
    if total <= 0:
        return f"no rank, in {times.compared} collectives"
    return f"{some_ranks([worst])}, {100 * most / total:.0f} % of all waiting in {times.compared} collectives"


def _bar(one: RankTime, step: float) -> str:
    parts = [round(BAR * part / step) for part in (one.computes, one.exposed)] if step else [0, 0]
    return f"[{'#' * parts[0]}{'=' * parts[1]}".ljust(BAR + 1, ".")[: BAR + 1] + "]"


def _text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
