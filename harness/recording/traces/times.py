"""Times of collectives on the devices, how much of them computation hid, and which rank the others waited for.

A collective ends on all its ranks at one time, and its kernel runs from when a rank has come to it. So the rank with
the shortest kernel came last, and each other one waited for as much longer as its own took. No clocks of ranks are
compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from harness.core.evidence.keys import ranks_from_key, ranks_key
from harness.core.plan.figures.gpus import Machine
from harness.recording.traces.job import TracedJob, TracedRank
from harness.recording.traces.kineto import Call, Span
from harness.recording.traces.phases import Ranges

ROUND_TRIPS = {"all_reduce": 2}
"""How often each byte passes a link, of collectives that do more than gather or scatter."""


@dataclass(frozen=True)
class CollectiveTime:
    """What ranks spent in one kind of collective, per rank and step."""

    groups: tuple[str, ...]
    """Groups that do alike, in the words of ranks_key."""
    op: str
    """Its operator."""
    phase: str
    """Phase of the step."""
    seconds: float
    """How long its kernels ran."""
    exposed: float
    """How much of that no other kernel ran beside."""
    waited: float | None
    """How much of that a rank waited for the last one to come; None where no collective has the kernels of all members."""
    rate: float
    """Bytes a second over a link, as a ring moves them, without the time waited: at least so many where that is not known."""
    link: float | None = None
    """Bytes a second of that link by a data sheet; None where no GPU was named."""


@dataclass(frozen=True)
class RankTime:
    """Where a rank's time went, in seconds of a step."""

    computes: float
    """How long it computes."""
    exposed: float
    """How long only a collective runs."""
    idle: float
    """How long no kernel runs."""
    waited: float
    """How long it waited in collectives for others to come."""
    caused: float
    """How long all others together waited for it."""


@dataclass(frozen=True)
class Times:
    """Where the time of a job went, per step."""

    took: tuple[CollectiveTime, ...]
    """Kinds of collectives, the longest exposed first."""
    step: float
    """Seconds of a step, on average."""
    ranks: Mapping[int, RankTime]
    """Rank -> where its time went."""
    compared: int
    """Collectives whose kernels all members traced."""


def times_of(job: TracedJob) -> Times | None:
    """Return where the time of the job went, in seconds per step.

    None where no trace has kernels of collectives, or no step is in all traces.
    """
    kernels = {rank: list(kernels_of(traced_rank)) for rank, traced_rank in job.ranks.items()}
    if not job.step_numbers or not any(kernels.values()):
        return None
    computes = {rank: Ranges.from_pairs(traced_rank.trace.compute) for rank, traced_rank in job.ranks.items()}
    waited_for = find_waits(kernels)
    waits = waited_for.waits
    caused = waited_for.caused
    per_step = 1e-6 / len(job.step_numbers)
    ranks = {}
    steps = []
    for rank, traced_rank in job.ranks.items():
        begin = min(span.start for span in traced_rank.steps.values())
        end = max(span.end for span in traced_rank.steps.values())
        busy = computes[rank].overlap(begin, end)
        alone = _exposed_time(traced_rank.trace.kernels, computes[rank], begin, end)
        waited = sum(duration for (waiting_rank, _), duration in waits.items() if waiting_rank == rank)
        parts = (busy, alone, max(end - begin - busy - alone, 0.0), waited, caused.get(rank, 0.0))
        ranks[rank] = RankTime(*(part * per_step for part in parts))
        steps.append((end - begin) * per_step)
    took = tuple(_collective_times(kernels, computes, waits, len(job.step_numbers)))
    return Times(took, float(np.mean(steps)), ranks, waited_for.compared)


def with_links(times: Times, machine: Machine, nodes_of: int) -> Times:
    """Return the times with the speed of the links that each kind of collective uses, by a data sheet.

    Ranks are taken to fill nodes of `nodes_of` ranks in their order. A link is across nodes if any group spans several.
    """

    def link_speed(kind: CollectiveTime) -> float:
        nodes_of_groups = (_count_nodes(group, nodes_of) for group in kind.groups)
        return machine.bytes_per_second_in_node if max(nodes_of_groups) == 1 else machine.bytes_per_second_across_nodes

    return replace(times, took=tuple(replace(kind, link=link_speed(kind)) for kind in times.took))


def _count_nodes(group: str, nodes_of: int) -> int:
    """Return the number of nodes that a group's ranks are on. group: in the words of ranks_key."""
    return len({rank // nodes_of for rank in ranks_from_key(group)})


def exposed_by_step(job: TracedJob) -> dict[tuple[int, str, str], tuple[float, ...]]:
    """Return by (group size, operator, phase) the seconds of each step in which a rank's collective ran and no other
    kernel.

    They are averages over the ranks that have any.
    """
    exposed_times: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0] * len(job.step_numbers))
    ranks: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    for rank, traced_rank in job.ranks.items():
        computes = Ranges.from_pairs(traced_rank.trace.compute)
        for call in kernels_of(traced_rank):
            key = (len(call.collective.ranks), call.collective.op, call.collective.phase)
            span = call.span
            exposed_times[key][call.collective.step - 1] += (
                span.end - span.start - computes.overlap(span.start, span.end)
            )
            ranks[key].add(rank)
    seconds_by_key: dict[tuple[int, str, str], tuple[float, ...]] = {}
    for key, steps in exposed_times.items():
        seconds_by_key[key] = tuple(1e-6 * exposed_time / len(ranks[key]) for exposed_time in steps)
    return seconds_by_key


def kernels_of(traced_rank: TracedRank) -> Iterator[Call]:
    """Yield the kernels of a rank in its steps, each with the collective that issued it.

    A call gets the next kernel of its group and operator that began after it and that no earlier call has. Calls
    without a kernel are left out.
    """
    free_spans: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for kernel in sorted(traced_rank.trace.kernels, key=lambda kernel: -kernel.span.start):
        free_spans[kernel.collective.group, kernel.collective.op].append(kernel.span)
    issued = sorted(traced_rank.trace.calls, key=lambda call: call.span.start)
    calls_in_steps = {id(call.span): call for call in traced_rank.calls}
    for call in issued:
        spans = free_spans[call.collective.group, call.collective.op]
        while spans and spans[-1].start < call.span.start:
            spans.pop()
        span = spans.pop() if spans else None
        if span is not None and id(call.span) in calls_in_steps:
            yield Call(span, calls_in_steps[id(call.span)].collective)


class Waits(NamedTuple):
    """Who waited for whom, in the collectives whose members all have kernels."""

    waits: dict[tuple[int, int], float]
    """Rank and place among its kernels -> microseconds that it waited."""
    caused: dict[int, float]
    """Rank -> microseconds that all others waited for it."""
    last: Counter[int]
    """Rank -> to how many collectives it came last; one to which several came last is nobody's."""
    compared: int
    """Number of these collectives."""


def find_waits(kernels: Mapping[int, Sequence[Call]]) -> Waits:
    """Return who waited for whom, in microseconds. Only collectives whose members all have kernels; sends are left out.

    kernels: by rank, its kernels of collectives. The rank with the shortest kernel came last.
    """
    kernel_times: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[int, float]]] = defaultdict(dict)
    for rank, calls in kernels.items():
        for index, call in enumerate(calls):
            if call.collective.peer is None:
                key = (call.collective.group, call.collective.ranks, call.collective.seq)
                kernel_times[key][rank] = (index, call.span.end - call.span.start)
    complete = [
        time_of_rank for (_, ranks, _), time_of_rank in kernel_times.items() if len(time_of_rank) == len(ranks) > 1
    ]
    waits = Waits({}, {}, Counter(), compared=len(complete))
    for time_of_rank in complete:
        last = min(time_of_rank, key=lambda rank: time_of_rank[rank][1])
        wait_times = {
            (rank, index): duration - time_of_rank[last][1] for rank, (index, duration) in time_of_rank.items()
        }
        waits.caused[last] = waits.caused.get(last, 0.0) + sum(wait_times.values())
        waits.last[last] += sorted(wait_times.values())[1] > 0
        waits.waits.update(wait_times)
    return waits


def _exposed_time(kernels: Sequence[Call], computes: Ranges, begin: float, end: float) -> float:
    """Return how long, within this time, collectives ran and no other kernel did, in microseconds."""
    ranges = Ranges.from_spans(kernel.span for kernel in kernels)
    pairs = zip(ranges.starts.clip(begin, end), ranges.ends.clip(begin, end), strict=True)
    return float(sum(stop - start - computes.overlap(start, stop) for start, stop in pairs if stop > start))


def _collective_times(
    kernels: Mapping[int, Sequence[Call]],
    computes: Mapping[int, Ranges],
    waits: Mapping[tuple[int, int], float],
    steps: int,
) -> Iterator[CollectiveTime]:
    """Yield the cost of each kind of collective per rank and step, the longest exposed first.

    Groups of one size are of one kind.
    """
    costs_by_key: dict[tuple[int, str, str], list[tuple[float, float, float, float]]] = defaultdict(list)
    known_keys = set[tuple[int, str, str]]()
    groups: dict[tuple[int, str, str], set[str]] = defaultdict(set)
    ranks: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    for rank, calls in kernels.items():
        for index, call in enumerate(calls):
            collective = call.collective
            span = call.span
            size = len(collective.ranks)
            key = (size, collective.op, collective.phase)
            groups[key].add(ranks_key(collective.ranks))
            ranks[key].add(rank)
            if (rank, index) in waits:
                known_keys.add(key)
            duration = span.end - span.start
            exposed = duration - computes[rank].overlap(span.start, span.end)
            wait_time = waits.get((rank, index), 0.0)
            moved_bytes = collective.bytes * ROUND_TRIPS.get(collective.op, 1) * (size - 1) / size
            costs_by_key[key].append((duration, exposed, wait_time, moved_bytes))
    for key in sorted(costs_by_key, key=lambda key: -sum(cost[1] for cost in costs_by_key[key])):
        duration, exposed, wait_time, moved_bytes = (sum(values) for values in zip(*costs_by_key[key], strict=True))
        rank_steps = len(ranks[key]) * steps * 1e6
        rate = moved_bytes / max(duration - wait_time, 1e-9) * 1e6
        known_wait = wait_time / rank_steps if key in known_keys else None
        yield CollectiveTime(
            tuple(sorted(groups[key])), key[1], key[2], duration / rank_steps, exposed / rank_steps, known_wait, rate
        )
