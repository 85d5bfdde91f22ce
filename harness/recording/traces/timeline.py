"""Picture of one step of each rank: when it computes, when it is in a collective, and which part of that it waits.

Ranks of traces are drawn by their own clocks, each from the beginning of its step. Ranks of a recording have one clock
if they are on one machine. If they are not, it is not known who came last.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from harness.core.evidence.recording import RankRecord
from harness.core.evidence.records import BACKGROUND, Collective
from harness.recording.traces.job import TracedJob
from harness.recording.traces.phases import Ranges
from harness.recording.traces.times import find_waits, kernels_of

COMPUTE_LANE = "computes"
RANK_CLOCKS = "each rank by its own clock, from the beginning of its step"
MACHINE_CLOCK = "all ranks by the clock of their machine"
SMALLEST_GAP = 1 / 1500
"""Part of a step: shorter gaps between kernels are not drawn."""


@dataclass(frozen=True)
class Stretch:
    """Time in which a rank computes or is in one collective, as a bar of the picture."""

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
    """One step of a job as a picture, and which ranks came last to the collectives of all steps."""

    step: int
    """Number of the step."""
    length: float
    """Seconds of the longest rank."""
    ranks: Mapping[int, Sequence[Stretch]]
    """Rank -> what it is in, in the order of time."""
    times_last: Mapping[int, int]
    """Rank -> to how many collectives of all steps it came last."""
    caused_waiting: Mapping[int, float]
    """Rank -> how many seconds the others together waited for it, in all steps."""
    compared_collectives: int
    """Collectives of all steps of which it is known who came when."""
    clock: str
    """By which clocks ranks are drawn, in words."""


def timeline_of_traces(job: TracedJob) -> Timeline | None:
    """Return the last step of a traced job, each rank by its own clock, and who came last in all steps.

    None where no trace has kernels of collectives, or no step is in all traces.
    """
    kernels = {rank: list(kernels_of(traced_rank)) for rank, traced_rank in job.ranks.items()}
    if not job.step_numbers or not any(kernels.values()):
        return None
    waited_for = find_waits(kernels)
    number = len(job.step_numbers)
    stretches_by_rank = {}
    lengths = []
    for rank, traced_rank in job.ranks.items():
        begin = traced_rank.steps[number].start
        end = traced_rank.steps[number].end
        lengths.append(1e-6 * (end - begin))
        busy = _ranges_within(Ranges.from_pairs(traced_rank.trace.compute), begin, end)
        stretches = [
            Stretch(COMPUTE_LANE, 1e-6 * (start - begin), 1e-6 * (stop - begin), COMPUTE_LANE) for start, stop in busy
        ]
        for index, call in enumerate(kernels[rank]):
            if call.collective.step == number:
                start = 1e-6 * (call.span.start - begin)
                stop = 1e-6 * (call.span.end - begin)
                waited = 1e-6 * waited_for.waits.get((rank, index), 0.0)
                stretches.append(Stretch(_lane_of(call.collective), start, stop, _call_text(call.collective), waited))
        stretches_by_rank[rank] = stretches
    seconds = {rank: 1e-6 * caused_time for rank, caused_time in waited_for.caused.items()}
    return Timeline(
        job.step_numbers[-1],
        max(lengths),
        stretches_by_rank,
        waited_for.last,
        seconds,
        waited_for.compared,
        RANK_CLOCKS,
    )


def _ranges_within(busy: Ranges, begin: float, end: float) -> list[tuple[float, float]]:
    """Return the (start, end) of the ranges between `begin` and `end`, in their unit, with small gaps closed.

    Empty if there is none.
    """
    overlapping = slice(int(np.searchsorted(busy.ends, begin)), int(np.searchsorted(busy.starts, end)))
    joined: list[tuple[float, float]] = []
    for start, stop in zip(
        busy.starts[overlapping].clip(begin, end), busy.ends[overlapping].clip(begin, end), strict=True
    ):
        if joined and start - joined[-1][1] < SMALLEST_GAP * (end - begin):
            joined[-1] = (joined[-1][0], float(stop))
        else:
            joined.append((float(start), float(stop)))
    return joined


def timeline_of_records(records: Mapping[int, RankRecord]) -> Timeline | None:
    """Return the last step that all ranks recorded with times, and who came last in all steps.

    None where there is no such step, or no collective has times. Nobody came last if ranks are on several machines.
    """
    began: dict[int, dict[int, float]] = {}
    for rank, record in records.items():
        began[rank] = {step.step: step.began for step in record.steps if step.began and step.step in record.ended_steps}
    common = set.intersection(*(set(steps) for steps in began.values())) if began else set()
    calls = {rank: _timed_calls(record) for rank, record in records.items()}
    if not common or not any(calls.values()):
        return None
    step = max(common)
    is_one_clock = len({record.host for record in records.values()}) == 1
    arrivals_by_key = _arrivals_by_call(calls) if is_one_clock else {}
    first = min(began_by_step[step] for began_by_step in began.values())
    caused = dict[int, float]()
    last = Counter[int]()
    for arrivals in arrivals_by_key.values():
        latest = max(arrivals, key=lambda rank: arrivals[rank])
        last[latest] += 1
        caused[latest] = caused.get(latest, 0.0) + sum(arrivals[latest] - arrival for arrival in arrivals.values())
    stretches_by_rank = {}
    for rank, rank_calls in calls.items():
        start = first if is_one_clock else began[rank][step]
        stretches_by_rank[rank] = [
            _blocked_stretch(call, start, arrivals_by_key) for call in rank_calls if call.step == step
        ]
    all_stretches = itertools.chain.from_iterable(stretches_by_rank.values())
    length = max((stretch.stop for stretch in all_stretches), default=0.0)
    clock = MACHINE_CLOCK if is_one_clock else RANK_CLOCKS
    return Timeline(step, length, stretches_by_rank, last, caused, len(arrivals_by_key), clock)


def _timed_calls(record: RankRecord) -> list[Collective]:
    """Return the collectives of steps that have times, without those of other threads."""
    calls = record.evidence.collectives
    return [call for call in calls if call.began is not None and call.step and call.phase != BACKGROUND]


Arrivals = Mapping[tuple[str, tuple[int, ...], int], Mapping[int, float]]
"""(group, its ranks, position) -> rank -> when it came."""


def _arrivals_by_call(calls: Mapping[int, Iterable[Collective]]) -> Arrivals:
    """Return by collective the seconds at which each rank came to it.

    Only collectives that all members of their group issued.
    """
    arrivals_by_key: dict[tuple[str, tuple[int, ...], int], dict[int, float]] = defaultdict(dict)
    for rank, rank_calls in calls.items():
        for call in rank_calls:
            if call.peer is None and len(call.ranks) > 1:
                arrivals_by_key[call.group, call.ranks, call.seq][rank] = call.began or 0.0
    return {key: rank_arrivals for key, rank_arrivals in arrivals_by_key.items() if len(rank_arrivals) == len(key[1])}


def _blocked_stretch(call: Collective, start: float, arrivals_by_key: Arrivals) -> Stretch:
    """Return a collective as a stretch, as long as it blocked its thread. start: seconds at which the drawing begins.

    It waited until the last rank came, as far as that is known.
    """
    rank_arrivals = arrivals_by_key.get((call.group, call.ranks, call.seq), {})
    began = call.began or 0.0
    blocked = call.blocked or 0.0
    waited = min(max(rank_arrivals.values()) - began, blocked) if rank_arrivals and call.peer is None else 0.0
    return Stretch(_lane_of(call), began - start, began - start + blocked, _call_text(call), waited)


def _lane_of(call: Collective) -> str:
    return f"{call.op} over {len(call.ranks)}"


def _call_text(call: Collective) -> str:
    return f"{call.op} in {call.phase}, {call.bytes:,} bytes of {call.dtype}"
