"""Figures of a job that people watch from version to version: traffic, memory, step time and time in collectives, by axis.

No check reads them, for no two runs have the same times. Two jobs may pass every check and differ in them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Use
from harness.core.judge.measures import BLOCKED, HELD, MOVED, PARAMETERS, PEAK, SECONDS
from harness.core.judge.observed import Moved, observed_axes
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import number_alike_axes

STEP = "step time"
MEMORY = "memory"
TRAFFIC = "traffic"
WAITS = "blocked"
EXPOSED = "exposed"
OF_AXES = (TRAFFIC, WAITS, EXPOSED)
"""Kinds of which nothing was there where a job has others of the kind and not this one."""
BYTES = "bytes"
TIME = "seconds"
CHANCE = 20
"""Chance alone may separate the steps of one in so many pairs of jobs."""


@dataclass(frozen=True)
class Figure:
    """One number of a job."""

    kind: str
    """Kind: step time, memory, traffic, blocked or exposed."""
    name: str
    """Name among figures of that kind, in words."""
    values: tuple[float, ...]
    """A value for each step in which it was seen; a single one where it is the same in each, or of the whole job."""

    @property
    def unit(self) -> str:
        return BYTES if self.kind in (MEMORY, TRAFFIC) else TIME

    @property
    def value(self) -> float:
        """Return the median of its values."""
        return statistics.median(self.values)


Figures = Mapping[tuple[str, str], Figure]
"""(kind, name) -> the figure."""


@dataclass(frozen=True)
class Shift:
    """A figure that two jobs have, and differ in. Fields are keys of the comparison document, so their names stay."""

    kind: str
    """Kind of the figure."""
    of: str
    """Name among figures of that kind."""
    unit: str
    """Unit: bytes or seconds."""
    one: float
    """Value in the first job: the median of its steps."""
    other: float
    """Value in the second job: the median of its steps."""
    within: bool | None
    """Whether the values of their steps overlap; None where they do not, and steps are too few to show the noise."""
    spread: tuple[tuple[float, float], tuple[float, float]]
    """Least and most of both, over their steps."""

    @property
    def order(self) -> tuple[int, float, float]:
        """Return what it is sorted by: what noise cannot be comes first, and then the larger change, whichever way it goes."""
        size = abs(math.log(self.other / self.one)) if self.one and self.other else math.inf
        return (False, None, True).index(self.within), -size, -max(self.one, self.other)


def figures_by_name(all_figures: Iterable[Figure]) -> Figures:
    """Return the figures by (kind, name)."""
    return {(figure.kind, figure.name): figure for figure in all_figures}


def figures_of_recording(recording: Recording, *, warm: bool = False) -> Figures:
    """Return the figures of a recording's first job, by (kind, name); empty if no rank left evidence.

    warm: whether the first step is like the others. If it is not, times are those of later steps, where there are some.
    """
    summaries = [summary for _, summary in sorted(recording.summaries.items())]
    return figures_by_name(_figures_of_job(summaries, warm=warm))


def _figures_of_job(summaries: Sequence[Summary], *, warm: bool) -> Iterator[Figure]:
    """Yield step time, memory, traffic and blocked time of a job. What was not measured, or is 0, has no figure.

    Step time is the slowest rank's, memory the most of any rank. Traffic is the bytes of the busiest rank of an axis in
    a step, by collective and phase.
    """
    if seconds := _values_of_steps([summary.resources.seconds for summary in summaries], warm, max):
        yield Figure(STEP, "slowest rank", seconds)
    if peak := max((summary.resources.peak for summary in summaries), default=0):
        yield Figure(MEMORY, "peak", (peak,))
    kinds: set[str] = set()
    uses: list[Use] = []
    for summary in summaries:
        kinds.update(summary.resources.memory)
        uses += summary.traffic.uses
    for kind in sorted(kinds):
        largest = max(summary.resources.memory.get(kind, 0) for summary in summaries)
        yield Figure(MEMORY, kind.replace("_", " "), (largest,))
    for number, axis in number_alike_axes(observed_axes(summaries)):
        axis_name = axis.role or f"over {axis.size} ranks"
        if number:
            axis_name += f" ({number + 1})"
        uses_of_axis = [use for use in uses if use.ranks in axis.groups]
        for (op, phase), moved in _moved_by_call(axis.moved).items():
            yield Figure(TRAFFIC, f"{op} in {phase}, {axis_name}", (sum(amount.most for amount in moved),))
            if blocked := _blocked_seconds(uses_of_axis, op, phase, warm=warm):
                yield Figure(WAITS, f"{op} in {phase}, {axis_name}", blocked)


def _moved_by_call(moved: Iterable[Moved]) -> dict[tuple[str, str], list[Moved]]:
    """Return by (op, phase) what an axis moves. Entries that differ in dtype alone are in one list."""
    by_call: dict[tuple[str, str], list[Moved]] = {}
    for amount in moved:
        by_call.setdefault((amount.op, amount.phase), []).append(amount)
    return by_call


def _blocked_seconds(uses: Iterable[Use], op: str, phase: str, *, warm: bool) -> tuple[float, ...]:
    """Return for each step the mean over ranks of the seconds that they are blocked in this op and phase.

    Empty if calls of some ranks were not timed.
    """
    blocked_times = [use.blocked for use in uses if (use.op, use.phase) == (op, phase)]
    return _values_of_steps(blocked_times, warm, statistics.mean) if all(blocked_times) else ()


def _values_of_steps(
    values_of_ranks: Sequence[Mapping[int, float]], warm: bool, joined: Callable[[Iterable[float]], float]
) -> tuple[float, ...]:
    """Return a value for each step that all ranks have: of the first step only if it is warm or the only one.

    Empty if there are no ranks, or no common step. values_of_ranks: for each rank, step -> value. joined: returns one
    value of those of all ranks.
    """
    if not values_of_ranks:
        return ()
    steps = sorted(set.intersection(*map(set, values_of_ranks)))
    if not warm:
        steps = [step for step in steps if step > 1] or steps
    values = []
    for step in steps:
        values.append(joined([values_of_rank[step] for values_of_rank in values_of_ranks]))
    return tuple(values)


def figures_of_measures(measures: Mapping[str, float]) -> Figures:
    """Return the figures that a verdict keeps of a case, by (kind, name), in the plan's words for axes.

    Measures that are neither time, memory, traffic nor blocked time are left out. Each figure has one value.
    """
    kinds = {SECONDS: STEP, PEAK: MEMORY, HELD: MEMORY, PARAMETERS: MEMORY}
    kinds |= {
        name: TRAFFIC if name.startswith(MOVED) else WAITS for name in measures if name.startswith((MOVED, BLOCKED))
    }
    return figures_by_name(Figure(kinds[name], name, (value,)) for name, value in measures.items() if name in kinds)


def find_shifts(baseline: Figures, candidate: Figures) -> list[Shift]:
    """Return the figures that differ, the largest change first; what lies within the spread of steps comes last.

    If one job lacks an axis that it could show, its figure counts as 0. Other figures that only one job has are left
    out.
    """
    all_shifts = []
    for key in dict.fromkeys([*baseline, *candidate]):
        first = baseline.get(key) or _zero_figure(key, baseline)
        second = candidate.get(key) or _zero_figure(key, candidate)
        if first is not None and second is not None and first.values != second.values:
            all_shifts.append(_shift_between(first, second))
    return sorted(all_shifts, key=lambda shift: shift.order)


def _zero_figure(key: tuple[str, str], known_figures: Figures) -> Figure | None:
    """Return a figure of 0 for an axis that a job does not have. None if nothing shows whether it has it."""
    kind, name = key
    has_others_of_kind = any(known_kind == kind for known_kind, _ in known_figures)
    return Figure(kind, name, (0.0,)) if kind in OF_AXES and has_others_of_kind else None


def _shift_between(first: Figure, second: Figure) -> Shift:
    """Return the change of a figure between two jobs, with medians and ranges, and whether the ranges overlap.

    `within` is always False for bytes, and for times that only one job has.
    """
    first_range = (min(first.values), max(first.values))
    second_range = (min(second.values), max(second.values))
    overlap = first_range[0] <= second_range[1] and second_range[0] <= first_range[1]
    # where both are 0, most steps have none
    is_exact = first.unit == BYTES or bool(first.value) != bool(second.value)
    several = min(len(first.values), len(second.values)) > 1
    is_within_spread: bool | None = False
    if not is_exact:
        if several and overlap:
            is_within_spread = True
        elif _can_be_chance(first, second):
            is_within_spread = None
    spread = (first_range, second_range)
    return Shift(first.kind, first.name, first.unit, first.value, second.value, is_within_spread, spread)


def _can_be_chance(first: Figure, second: Figure) -> bool:
    """Return whether both have so few steps that chance alone would separate them in one of CHANCE pairs of jobs, or more."""
    return math.comb(len(first.values) + len(second.values), len(first.values)) <= 2 * CHANCE
