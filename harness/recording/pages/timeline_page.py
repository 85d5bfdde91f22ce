"""Page for a browser on traces or a recording: what the report says, one step of each rank drawn, and who came last."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.core.evidence.text import count_text
from harness.core.report.drawings import Drawing, Section, Table
from harness.core.report.page import Page
from harness.core.report.svg import Bar, lanes_svg
from harness.recording.pages.compared import amount_text
from harness.recording.traces.timeline import COMPUTE_LANE, Stretch, Timeline

MOST_RANKS = 8
"""Ranks that are drawn: those of which others waited longest, and the first ones."""
MOST_BARS = 300
"""Bars of a row."""


def page_of_times(title: str, text: str, timeline: Timeline | None, *, kernels: bool) -> Page:
    """Return the page with one step of each rank drawn, who waited for whom, and the report.

    text: the report. timeline: None or an empty one if no step has times; a section then says so. kernels: whether bars
    are kernels, and not calls of the thread that trains.
    """
    report = Section("What the report says", False, text=text)
    if timeline is None or not timeline.length:
        why = "none that all ranks have, with times of collectives"
        return Page((), (), title=title, sections=(Section("A step", False, text=why), report))
    return Page(
        (), (), title=title, sections=(_step_section(timeline, kernels=kernels), *_waiting_sections(timeline), report)
    )


def _step_section(timeline: Timeline, *, kernels: bool) -> Section:
    """Return the section with one step drawn: the MOST_RANKS ranks for which others waited longest, a row for each
    lane.

    A row has its MOST_BARS longest bars.
    """
    ranks_by_caused = sorted(timeline.ranks, key=lambda rank: (-timeline.caused_waiting.get(rank, 0.0), rank))
    ranks = sorted(ranks_by_caused[:MOST_RANKS])
    rows = []
    for rank in ranks:
        names = dict.fromkeys(stretch.lane for stretch in timeline.ranks[rank])
        for lane in sorted(names, key=lambda name: (name != COMPUTE_LANE, name)):
            stretches = [stretch for stretch in timeline.ranks[rank] if stretch.lane == lane]
            longest = sorted(stretches, key=lambda stretch: stretch.start - stretch.stop)[:MOST_BARS]
            rows.append((f"{rank} {lane}", list(itertools.chain.from_iterable(map(_stretch_bars, longest)))))
    bar_text = "A bar is a kernel." if kernels else "A bar is a call, for as long as it blocked the thread that trains."
    left_text = (
        f" Of {count_text(len(timeline.ranks), 'rank')} these {len(ranks)}." if len(ranks) < len(timeline.ranks) else ""
    )
    hatched_text = " Hatched: another rank had not come yet." if timeline.compared_collectives else ""
    caption = f"{bar_text}{hatched_text} The row is {amount_text('seconds', timeline.length)} long.{left_text}"
    title = f"Step {timeline.step}; {timeline.clock}"
    drawing = Drawing(title, lanes_svg(title, rows, timeline.length), caption)
    return Section("Where the time of a step went", False, drawings=(drawing,), wide=True)


def _stretch_bars(stretch: Stretch) -> Sequence[Bar]:
    """Return the bars of a stretch: one, or a hatched one for the wait and one for the rest."""
    text = f"{stretch.text}: {amount_text('seconds', stretch.stop - stretch.start)}"
    if not stretch.waited:
        return [Bar(stretch.start, stretch.stop, text)]
    waited_until = min(stretch.start + stretch.waited, stretch.stop)
    waited = Bar(
        stretch.start, waited_until, f"{text}, of which waited {amount_text('seconds', stretch.waited)}", odd=True
    )
    return [waited, Bar(waited_until, stretch.stop, text)]


def _waiting_sections(timeline: Timeline) -> Sequence[Section]:
    """Return one section with a table of ranks by how long others waited for them, in all steps; or that it is not known."""
    if not timeline.compared_collectives:
        why = "not known: no collective has the times of all its members on one clock, or their kernels"
        return (Section("Who waited for whom", False, text=why),)
    order = sorted(timeline.ranks, key=lambda rank: (-timeline.caused_waiting.get(rank, 0.0), rank))
    rows = [
        (
            str(rank),
            str(timeline.times_last.get(rank, 0)),
            amount_text("seconds", timeline.caused_waiting.get(rank, 0.0)),
        )
        for rank in order[: 2 * MOST_RANKS]
    ]
    collectives = count_text(timeline.compared_collectives, "collective")
    title = f"Of {collectives} of all steps; seconds are those of all other ranks together"
    table = Table(title, ("rank", "came last to", "others waited"), tuple(rows))
    return (Section("Who waited for whom", False, tables=(table,)),)
