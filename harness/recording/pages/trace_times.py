"""Rows of a page of traces on time: what collectives took, what was hidden, who was waited for, and a drawing of ranks."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.case.case import Case
from harness.core.evidence.text import bytes_text, count_text, some_ranks_text
from harness.core.plan.figures.pipeline_time import matmul_operations, pipeline_time
from harness.core.report.text import Rows
from harness.recording.pages.recording_page import groups_text
from harness.recording.traces.times import CollectiveTime, RankTime, Times

MOST_ROWS = 8
PHASE_TEXTS = {"other": "between passes", "optimizer": "in the optimizer's step"}
BAR_WIDTH = 40
"""Letters of a drawn step."""


def time_rows(times: Times, case: Case | None = None, gpu: str = "") -> Rows:
    """Return the rows on time: a drawing of ranks, what each spends on what, and collectives, the longest exposed
    first.

    All times are seconds of a step and a rank, on average. case: the plan, where one is known; with pp it adds a row on
    the bubble. gpu: whose links are compared, in words. At most MOST_ROWS ranks and collectives.
    """
    rows: Rows = [("time", f"{_seconds_text(times.step)} a step, of which on each rank:")]
    drawn_ranks = sorted(times.ranks, key=lambda rank: times.ranks[rank].computes)
    drawn_ranks = (
        drawn_ranks
        if len(drawn_ranks) <= MOST_ROWS
        else [*drawn_ranks[: MOST_ROWS // 2], *drawn_ranks[-MOST_ROWS // 2 :]]
    )
    rows += [("", f"  {_step_bar(times.ranks[rank], times.step)} rank {rank}") for rank in sorted(drawn_ranks)]
    rows.append(("", "  # computes, = only a collective runs, . no kernel runs"))
    for label, part in (("computes", "computes"), ("only collectives", "exposed"), ("no kernel", "idle")):
        seconds_by_rank = {rank: getattr(rank_time, part) for rank, rank_time in times.ranks.items()}
        rows.append(("", f"  {label}: {_seconds_range_text(seconds_by_rank)}"))
    rows += [
        ("collectives" if not index else "", _collective_time_text(kind))
        for index, kind in enumerate(times.took[:MOST_ROWS])
    ]
    if len(times.took) > MOST_ROWS:
        rows.append(("", f"  .. and {len(times.took) - MOST_ROWS} more kinds"))
    if gpu and any(took.link for took in times.took):
        rows.append(("links", f"by the data sheet of {gpu}, filled in the order of ranks"))
    if case is not None and case.dims.pp > 1:
        rows.append(("bubble", _bubble_text(times, case)))
    return [*rows, ("waited for", _last_rank_text(times))]


def _bubble_text(times: Times, case: Case) -> str:
    """Return the idle time that the schedule plans, and the idle time seen on the busiest rank, which holds more than
    the bubble.

    Both are percentages of what that rank computes. Precondition: a case with pp.
    """
    planned = pipeline_time(case, lambda stage: matmul_operations(case, stage)).bubble_ratio
    busiest = max(times.ranks, key=lambda rank: times.ranks[rank].computes)
    computes = times.ranks[busiest].computes
    schedule_text = (
        f"{case.features.schedule}, {count_text(case.microbatches, 'microbatch').replace('batchs', 'batches')}"
    )
    schedule_text += f", {count_text(case.n_stages, 'stage')}"
    plan = f"planned {100 * planned:.3g} % of what the busiest rank computes ({schedule_text})"
    if not computes:
        return f"{plan}; no rank computes in these traces"
    idle_percent = 100 * (times.step - computes) / computes
    seen_text = f"rank {busiest} does not compute for {idle_percent:.3g} % of that"
    return f"{plan}; seen: {seen_text}, with all exposed communication and every other idle time in it"


def _seconds_range_text(seconds_by_rank: Mapping[int, float]) -> str:
    """Return the shortest and the longest time, with their ranks; one time if both read the same."""
    shortest = min(seconds_by_rank, key=lambda rank: seconds_by_rank[rank])
    longest = max(seconds_by_rank, key=lambda rank: seconds_by_rank[rank])
    if _seconds_text(seconds_by_rank[shortest]) == _seconds_text(seconds_by_rank[longest]):
        return _seconds_text(seconds_by_rank[longest])
    shortest_text = _seconds_text(seconds_by_rank[shortest])
    longest_text = _seconds_text(seconds_by_rank[longest])
    return f"{shortest_text} (rank {shortest}) to {longest_text} (rank {longest})"


def _collective_time_text(kind: CollectiveTime) -> str:
    """Return the text on one kind of collective: seconds that it takes, is exposed and waited, and bytes a second over
    a link.

    The rate is "at least" so much where it is not known how long it waited. With a known link, it is also a part of
    that.
    """
    collective_text = f"{kind.op} {PHASE_TEXTS.get(kind.phase, f'in {kind.phase}')} over {groups_text(kind.groups, 2)}"
    text = f"{collective_text}: {_seconds_text(kind.seconds)}, exposed {_seconds_text(kind.exposed)}"
    link_text = f", {100 * kind.rate / kind.link:.3g} % of {bytes_text(kind.link)}/s" if kind.link else ""
    if kind.waited is None:
        return f"{text}; at least {bytes_text(kind.rate)}/s over a link{link_text}"
    return f"{text}, waited {_seconds_text(kind.waited)}; {bytes_text(kind.rate)}/s over a link{link_text}"


def _last_rank_text(times: Times) -> str:
    """Return the rank for which the others waited longest in collectives, and its part of all waiting; or that it is
    not known."""
    if not times.compared:
        return "not known: no collective has the kernels of all its members"
    total = sum(rank_time.caused for rank_time in times.ranks.values())
    worst = max(times.ranks, key=lambda rank: times.ranks[rank].caused)
    caused = times.ranks[worst].caused
    if total <= 0:
        return f"no rank, in {times.compared} collectives"
    return f"{some_ranks_text([worst])}, {100 * caused / total:.0f} % of all waiting in {times.compared} collectives"


def _step_bar(rank_time: RankTime, step: float) -> str:
    """Return one step of a rank, drawn in letters: # computes, = only a collective runs, . no kernel runs."""
    parts = [round(BAR_WIDTH * part / step) for part in (rank_time.computes, rank_time.exposed)] if step else [0, 0]
    return f"[{'#' * parts[0]}{'=' * parts[1]}".ljust(BAR_WIDTH + 1, ".")[: BAR_WIDTH + 1] + "]"


def _seconds_text(seconds: float) -> str:
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms"
