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
from harness.core.judge.observed import Moved, axes
from harness.recording.judged.stored_recording import Recording
from harness.recording.judged.structure import numbered

STEP, MEMORY, TRAFFIC, WAITS, EXPOSED = "step time", "memory", "traffic", "blocked", "exposed"
OF_AXES = (TRAFFIC, WAITS, EXPOSED)
"""Kinds of which nothing was there where a job has others of the kind and not this one."""
BYTES, TIME = "bytes", "seconds"
CHANCE = 20
"""Chance alone may separate the steps of one in so many pairs of jobs."""


@dataclass(frozen=True)
class Figure:
    """One number of a job."""

    kind: str
    """Kind: step time, memory, traffic, blocked or exposed."""
    of: str
    """What of that kind, in words."""
    values: tuple[float, ...]
    """A value for each step in which it was seen; a single one where it is the same in each, or of the whole job."""

    @property
    def unit(self) -> str:
        return BYTES if self.kind in (MEMORY, TRAFFIC) else TIME

    @property
    def value(self) -> float:
        """Return the middle one."""
        return statistics.median(self.values)


Figures = Mapping[tuple[str, str], Figure]
"""(kind, of) -> the figure."""


@dataclass(frozen=True)
class Shift:
    """A figure that two jobs have, and differ in."""

    kind: str
    """Kind of the figure."""
    of: str
    """What of that kind."""
    unit: str
    """Unit: bytes or seconds."""
    one: float
    """Value in the one, of its step in the middle."""
    other: float
    """Value in the other."""
    within: bool | None
    """Whether the values of their steps overlap; None where they do not, and steps are too few to show the noise."""
    spread: tuple[tuple[float, float], tuple[float, float]]
    """Least and most of both, over their steps."""

    @property
    def order(self) -> tuple[int, float, float]:
        """Return what it is sorted by: what noise cannot be comes first, and then the larger change, whichever way it goes."""
        size = abs(math.log(self.other / self.one)) if self.one and self.other else math.inf
        return (False, None, True).index(self.within), -size, -max(self.one, self.other)


def by_name(found: Iterable[Figure]) -> Figures:
    return {(one.kind, one.of): one for one in found}


def figures(recording: Recording, *, warm: bool = False) -> Figures:
    """warm: whether the first step is like the others. If it is not, times are those of later steps, where there are some."""
    return by_name(_of_job([one for _, one in sorted(recording.summaries.items())], warm=warm))


def _of_job(summaries: Sequence[Summary], *, warm: bool) -> Iterator[Figure]:
    if seconds := _seconds([one.resources.seconds for one in summaries], warm, max):
        yield Figure(STEP, "slowest rank", seconds)
    if peak := max((one.resources.peak for one in summaries), default=0):
        yield Figure(MEMORY, "peak", (peak,))
    for kind in sorted({kind for one in summaries for kind in one.resources.memory}):
        yield Figure(MEMORY, kind.replace("_", " "), (max(one.resources.memory.get(kind, 0) for one in summaries),))
    used = [use for one in summaries for use in one.traffic.uses]
    for number, axis in numbered(axes(summaries)):
        name = (axis.role or f"over {axis.size} ranks") + (f" ({number + 1})" if number else "")
        here = [use for use in used if use.ranks in axis.groups]
        for (op, phase), moved in _alike(axis.moved).items():
            yield Figure(TRAFFIC, f"{op} in {phase}, {name}", (sum(one.most for one in moved),))
            if blocked := _blocked(here, op, phase, warm=warm):
                yield Figure(WAITS, f"{op} in {phase}, {name}", blocked)


def _alike(moved: Iterable[Moved]) -> dict[tuple[str, str], list[Moved]]:
    """Put what differs in its type alone together."""
    found: dict[tuple[str, str], list[Moved]] = {}
    for one in moved:
        found.setdefault((one.op, one.phase), []).append(one)
    return found


def _blocked(uses: Iterable[Use], op: str, phase: str, *, warm: bool) -> tuple[float, ...]:
    """Return the mean of ranks; nothing where calls of some were not timed."""
    mine = [use.blocked for use in uses if (use.op, use.phase) == (op, phase)]
    return _seconds(mine, warm, statistics.mean) if all(mine) else ()


def _seconds(
    of: Sequence[Mapping[int, float]], warm: bool, joined: Callable[[Iterable[float]], float]
) -> tuple[float, ...]:
    """Return a value for each step that all have: of the first one only if it is warm or the only one."""
    steps = sorted(set.intersection(*(set(one) for one in of))) if of else []
    later = steps if warm else [step for step in steps if step > 1] or steps
    return tuple(joined([one[step] for one in of]) for step in later)


def of_measures(measures: Mapping[str, float]) -> Figures:
    """Return the figures that a verdict keeps of a case, in the plan's words for axes."""
    kinds = {SECONDS: STEP, PEAK: MEMORY, HELD: MEMORY, PARAMETERS: MEMORY}
    kinds |= {
        name: TRAFFIC if name.startswith(MOVED) else WAITS for name in measures if name.startswith((MOVED, BLOCKED))
    }
    return by_name(Figure(kinds[name], name, (value,)) for name, value in measures.items() if name in kinds)


def shifts(one: Figures, other: Figures) -> list[Shift]:
    """Return what differs, the largest change first; what lies within the spread of steps comes last."""
    found = []
    for key in dict.fromkeys([*one, *other]):
        pair = [of.get(key) or _nothing(key, of) for of in (one, other)]
        a, b = pair
        if a is not None and b is not None and a.values != b.values:
            found.append(_shift(a, b))
    return sorted(found, key=lambda shift: shift.order)


def _nothing(key: tuple[str, str], there: Figures) -> Figure | None:
    """Return 0 for an axis that is not there; None where nothing shows whether it is."""
    kind, of = key
    return Figure(kind, of, (0.0,)) if kind in OF_AXES and any(known == kind for known, _ in there) else None


def _shift(one: Figure, other: Figure) -> Shift:
    spread = ((min(one.values), max(one.values)), (min(other.values), max(other.values)))
    overlap = spread[0][0] <= spread[1][1] and spread[1][0] <= spread[0][1]
    exact = one.unit == BYTES or bool(one.value) != bool(other.value)  # where both are 0, most steps have none
    several = min(len(one.values), len(other.values)) > 1
    within = False if exact else several and overlap or (None if _by_chance(one, other) else False)
    return Shift(one.kind, one.of, one.unit, one.value, other.value, within, spread)


def _by_chance(one: Figure, other: Figure) -> bool:
    """Return whether chance alone would separate one of CHANCE such pairs of jobs, or more."""
    return math.comb(len(one.values) + len(other.values), len(one.values)) <= 2 * CHANCE
