"""One step of each rank as a picture: when it computes, when it is in a collective, and which part of that it waits.

Ranks of traces are drawn by their own clocks, each from the beginning of its step. Ranks of a recording have one clock if they
are on one machine. If they are not, it is not known who came last.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import BACKGROUND, Collective
from harness.recording.traces.job import TracedJob
from harness.recording.traces.phases import Ranges
from harness.recording.traces.times import kernels_of, waits_of

COMPUTES = "computes"
CLOCKS, CLOCK = "each rank by its own clock, from the beginning of its step", "all ranks by the clock of their machine"
FINE = 1 / 1500
"""Part of a step: shorter gaps between kernels are not drawn."""


@dataclass(frozen=True)
class Stretch:
    """Something that a rank is in for a time."""

    lane: str
    """Its row: computes, or a collective's operator and the size of its group."""
    start: float
    """Seconds since the step began."""
    stop: float
    """When it ends."""
    text: str
    """What it is."""
    waited: float = 0.0
    """Seconds at its beginning in which another rank had not come."""


@dataclass(frozen=True)
class Timeline:
    """One step of a job."""

    step: int
    """Number of the step."""
    length: float
    """Seconds of the longest rank."""
    ranks: Mapping[int, Sequence[Stretch]]
    """Rank -> what it is in, in the order of time."""
    last: Mapping[int, int]
    """Rank -> to how many collectives of all steps it came last."""
    caused: Mapping[int, float]
    """Rank -> how many seconds the others together waited for it, in all steps."""
    compared: int
    """Collectives of all steps of which it is known who came when."""
    clock: str
    """By which clocks ranks are drawn, in words."""


def of_traces(job: TracedJob) -> Timeline | None:
    """Return the last step; None where no trace has kernels of collectives."""
    kernels = {rank: list(kernels_of(one)) for rank, one in job.ranks.items()}
    if not job.numbers or not any(kernels.values()):
        return None
    waited_for = waits_of(kernels)
    number, found, lengths = len(job.numbers), {}, []
    for rank, one in job.ranks.items():
        begin, end = one.steps[number].start, one.steps[number].end
        lengths.append(1e-6 * (end - begin))
        busy = _joined(Ranges.merged(one.trace.compute), begin, end)
        some = [Stretch(COMPUTES, 1e-6 * (a - begin), 1e-6 * (b - begin), COMPUTES) for a, b in busy]
        for place, call in enumerate(kernels[rank]):
            if call.what.step == number:
                a, b = 1e-6 * (call.span.start - begin), 1e-6 * (call.span.end - begin)
                some.append(
                    Stretch(_lane(call.what), a, b, _text(call.what), 1e-6 * waited_for.waits.get((rank, place), 0.0))
                )
        found[rank] = some
    seconds = {rank: 1e-6 * each for rank, each in waited_for.caused.items()}
    return Timeline(job.numbers[-1], max(lengths), found, waited_for.last, seconds, waited_for.compared, CLOCKS)


def _joined(busy: Ranges, begin: float, end: float) -> list[tuple[float, float]]:
    """Return what lies in this time, small gaps closed."""
    inside = slice(int(np.searchsorted(busy.ends, begin)), int(np.searchsorted(busy.starts, end)))
    found: list[tuple[float, float]] = []
    for start, stop in zip(busy.starts[inside].clip(begin, end), busy.ends[inside].clip(begin, end), strict=True):
        if found and start - found[-1][1] < FINE * (end - begin):
            found[-1] = (found[-1][0], float(stop))
        else:
            found.append((float(start), float(stop)))
    return found


def of_records(records: Mapping[int, RankRecord]) -> Timeline | None:
    """Return the last step that all ranks recorded with times; None where there is none."""
    began = {
        rank: {step.step: step.began for step in one.steps if step.began and step.step in one.ended_steps}
        for rank, one in records.items()
    }
    common = set.intersection(*(set(one) for one in began.values())) if began else set()
    calls = {rank: _timed(one) for rank, one in records.items()}
    if not common or not any(calls.values()):
        return None
    step, one_clock = max(common), len({one.host for one in records.values()}) == 1
    arrived = _arrivals(calls) if one_clock else {}
    first = min(of[step] for of in began.values())
    found, caused, last = {}, dict[int, float](), Counter[int]()
    for at in arrived.values():
        latest = max(at, key=lambda rank: at[rank])
        last[latest] += 1
        caused[latest] = caused.get(latest, 0.0) + sum(at[latest] - when for when in at.values())
    for rank, mine in calls.items():
        start = first if one_clock else began[rank][step]
        found[rank] = [_blocked(call, start, arrived) for call in mine if call.step == step]
    length = max((each.stop for some in found.values() for each in some), default=0.0)
    return Timeline(step, length, found, last, caused, len(arrived), CLOCK if one_clock else CLOCKS)


def _timed(record: RankRecord) -> list[Collective]:
    calls = record.evidence.collectives
    return [call for call in calls if call.began is not None and call.step and call.phase != BACKGROUND]


Arrivals = Mapping[tuple[str, tuple[int, ...], int], Mapping[int, float]]
"""(group, its ranks, position) -> rank -> when it came."""


def _arrivals(calls: Mapping[int, Iterable[Collective]]) -> Arrivals:
    """Return those of collectives that all members issued."""
    met: dict[tuple[str, tuple[int, ...], int], dict[int, float]] = defaultdict(dict)
    for rank, mine in calls.items():
        for call in mine:
            if call.peer is None and len(call.ranks) > 1:
                met[call.group, call.ranks, call.seq][rank] = call.began or 0.0
    return {key: at for key, at in met.items() if len(at) == len(key[1])}


def _blocked(call: Collective, start: float, arrived: Arrivals) -> Stretch:
    at = arrived.get((call.group, call.ranks, call.seq), {})
    began, blocked = call.began or 0.0, call.blocked or 0.0
    waited = min(max(at.values()) - began, blocked) if at and call.peer is None else 0.0
    return Stretch(_lane(call), began - start, began - start + blocked, _text(call), waited)


def _lane(call: Collective) -> str:
    return f"{call.op} over {len(call.ranks)}"


def _text(call: Collective) -> str:
    return f"{call.op} in {call.phase}, {call.bytes:,} bytes of {call.dtype}"
