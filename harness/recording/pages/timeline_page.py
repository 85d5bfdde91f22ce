"""The page of traces or of a recording for a browser: what the report says, one step of each rank drawn, and who came last."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.evidence.text import counted
from harness.core.report.drawings import Drawing, Section, Table
from harness.core.report.page import Page
from harness.core.report.svg import Bar, lanes
from harness.recording.pages.compared import amount
from harness.recording.traces.timeline import COMPUTES, Stretch, Timeline

MOST_RANKS = 8
"""Ranks that are drawn: those of which others waited longest, and the first ones."""
MOST_BARS = 300
"""Bars of a row."""


def page_of_times(title: str, text: str, timeline: Timeline | None, *, kernels: bool) -> Page:
    """text: the report. kernels: whether bars are kernels, and not calls of the thread that trains."""
    shown = Section("What the report says", False, text=text)
    if timeline is None or not timeline.length:
        why = "none that all ranks have, with times of collectives"
        return Page((), (), title=title, sections=(Section("A step", False, text=why), shown))
    return Page((), (), title=title, sections=(_drawn(timeline, kernels=kernels), *_late(timeline), shown))


def _drawn(timeline: Timeline, *, kernels: bool) -> Section:
    by_late = sorted(timeline.ranks, key=lambda rank: (-timeline.caused.get(rank, 0.0), rank))
    ranks = sorted(by_late[:MOST_RANKS])
    rows = []
    for rank in ranks:
        names = dict.fromkeys(each.lane for each in timeline.ranks[rank])
        for lane in sorted(names, key=lambda name: (name != COMPUTES, name)):
            some = [each for each in timeline.ranks[rank] if each.lane == lane]
            longest = sorted(some, key=lambda each: each.start - each.stop)[:MOST_BARS]
            rows.append((f"{rank} {lane}", [bar for each in longest for bar in _bars(each)]))
    what = "A bar is a kernel." if kernels else "A bar is a call, for as long as it blocked the thread that trains."
    left = f" Of {counted(len(timeline.ranks), 'rank')} these {len(ranks)}." if len(ranks) < len(timeline.ranks) else ""
    hatched = " Hatched: another rank had not come yet." if timeline.compared else ""
    below = f"{what}{hatched} The row is {amount('seconds', timeline.length)} long.{left}"
    title = f"Step {timeline.step}; {timeline.clock}"
    drawing = Drawing(title, lanes(title, rows, timeline.length), below)
    return Section("Where the time of a step went", False, drawings=(drawing,), wide=True)


def _bars(one: Stretch) -> Sequence[Bar]:
    text = f"{one.text}: {amount('seconds', one.stop - one.start)}"
    if not one.waited:
        return [Bar(one.start, one.stop, text)]
    between = min(one.start + one.waited, one.stop)
    waited = Bar(one.start, between, f"{text}, of which waited {amount('seconds', one.waited)}", odd=True)
    return [waited, Bar(between, one.stop, text)]


def _late(timeline: Timeline) -> Sequence[Section]:
    """Say who came last, in all steps."""
    if not timeline.compared:
        why = "not known: no collective has the times of all its members on one clock, or their kernels"
        return (Section("Who waited for whom", False, text=why),)
    order = sorted(timeline.ranks, key=lambda rank: (-timeline.caused.get(rank, 0.0), rank))
    rows = [
        (str(rank), str(timeline.last.get(rank, 0)), amount("seconds", timeline.caused.get(rank, 0.0)))
        for rank in order[: 2 * MOST_RANKS]
    ]
    title = f"Of {counted(timeline.compared, 'collective')} of all steps; seconds are those of all other ranks together"
    table = Table(title, ("rank", "came last to", "others waited"), tuple(rows))
    return (Section("Who waited for whom", False, tables=(table,)),)
