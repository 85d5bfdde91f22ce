"""How long collectives took on the devices, how much of that computation hid, and which rank the others waited for.

A collective ends on all its ranks at one time, and its kernel runs from when a rank has come to it. So the rank with the
shortest kernel came last, and each other one waited for as much longer as its own took. No clocks of ranks are compared.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from harness.core.evidence.keys import ranks_key, ranks_of
from harness.core.plan.figures.gpus import Machine
from harness.recording.traces.job import TracedJob, TracedRank
from harness.recording.traces.kineto import Call, Span
from harness.recording.traces.phases import Ranges

ROUND_TRIPS = {"all_reduce": 2}
"""How often each byte passes a link, of collectives that do more than gather or scatter."""


@dataclass(frozen=True)
class Took:
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

    took: tuple[Took, ...]
    """Kinds of collectives, the longest exposed first."""
    step: float
    """Seconds of a step, on average."""
    ranks: Mapping[int, RankTime]
    """Rank -> where its time went."""
    compared: int
    """Collectives whose kernels all members traced."""


def times_of(job: TracedJob) -> Times | None:
    """Return None where no trace has kernels of collectives."""
    kernels = {rank: list(kernels_of(one)) for rank, one in job.ranks.items()}
    if not job.numbers or not any(kernels.values()):
        return None
    computes = {rank: Ranges.merged(one.trace.compute) for rank, one in job.ranks.items()}
    waited_for = waits_of(kernels)
    waits, caused = waited_for.waits, waited_for.caused
    per_step = 1e-6 / len(job.numbers)
    ranks, steps = {}, []
    for rank, one in job.ranks.items():
        begin = min(span.start for span in one.steps.values())
        end = max(span.end for span in one.steps.values())
        busy, alone = computes[rank].overlap(begin, end), _alone(one.trace.kernels, computes[rank], begin, end)
        waited = sum(lasts for (whose, _), lasts in waits.items() if whose == rank)
        parts = (busy, alone, max(end - begin - busy - alone, 0.0), waited, caused.get(rank, 0.0))
        ranks[rank] = RankTime(*(part * per_step for part in parts))
        steps.append((end - begin) * per_step)
    took = tuple(_took(kernels, computes, waits, len(job.numbers)))
    return Times(took, float(np.mean(steps)), ranks, waited_for.compared)


def with_links(times: Times, machine: Machine, nodes_of: int) -> Times:
    """Return them with the speed of links. Ranks are taken to fill nodes in their order."""

    def speed(one: Took) -> float:
        nodes = (len({rank // nodes_of for rank in ranks_of(group)}) for group in one.groups)
        return machine.within if max(nodes) == 1 else machine.across

    return replace(times, took=tuple(replace(one, link=speed(one)) for one in times.took))


def exposed_by_step(job: TracedJob) -> dict[tuple[int, str, str], tuple[float, ...]]:
    """Return, by size of group, operator and phase, the seconds of each step that are exposed on a rank, on average."""
    found: dict[tuple[int, str, str], list[float]] = defaultdict(lambda: [0.0] * len(job.numbers))
    ranks: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    for rank, one in job.ranks.items():
        computes = Ranges.merged(one.trace.compute)
        for call in kernels_of(one):
            key, span = (len(call.what.ranks), call.what.op, call.what.phase), call.span
            found[key][call.what.step - 1] += span.end - span.start - computes.overlap(span.start, span.end)
            ranks[key].add(rank)
    return {key: tuple(1e-6 * each / len(ranks[key]) for each in steps) for key, steps in found.items()}


def kernels_of(one: TracedRank) -> Iterator[Call]:
    """Yield its kernels in these steps, as the calls that issued them: of each group and operator the next that began later."""
    free: dict[tuple[str, str], list[Span]] = defaultdict(list)
    for kernel in sorted(one.trace.kernels, key=lambda kernel: -kernel.span.start):
        free[kernel.what.group, kernel.what.op].append(kernel.span)
    issued = sorted(one.trace.calls, key=lambda call: call.span.start)
    here = {id(call.span): call for call in one.calls}
    for call in issued:
        spans = free[call.what.group, call.what.op]
        while spans and spans[-1].start < call.span.start:
            spans.pop()
        span = spans.pop() if spans else None
        if span is not None and id(call.span) in here:
            yield Call(span, here[id(call.span)].what)


class Waits(NamedTuple):
    """Who waited for whom, in the collectives whose members all have kernels."""

    waits: dict[tuple[int, int], float]
    """Rank and place among its kernels -> how long it waited."""
    caused: dict[int, float]
    """Rank -> how long all others waited for it."""
    last: Counter[int]
    """Rank -> to how many collectives it came last; one to which several came last is nobody's."""
    compared: int
    """Number of these collectives."""


def waits_of(kernels: Mapping[int, Sequence[Call]]) -> Waits:
    """kernels: by rank."""
    met: dict[tuple[str, tuple[int, ...], int], dict[int, tuple[int, float]]] = defaultdict(dict)
    for rank, calls in kernels.items():
        for place, call in enumerate(calls):
            if call.what.peer is None:
                met[call.what.group, call.what.ranks, call.what.seq][rank] = place, call.span.end - call.span.start
    told = Waits({}, {}, Counter(), sum(len(found) == len(ranks) > 1 for (_, ranks, _), found in met.items()))
    for (_, ranks, _), found in met.items():
        if len(found) == len(ranks) > 1:
            last = min(found, key=lambda rank: found[rank][1])
            longer = {(rank, place): took - found[last][1] for rank, (place, took) in found.items()}
            told.caused[last] = told.caused.get(last, 0.0) + sum(longer.values())
            told.last[last] += sorted(longer.values())[1] > 0
            told.waits.update(longer)
    return told


def _alone(kernels: Sequence[Call], computes: Ranges, begin: float, end: float) -> float:
    """Return how long collectives ran in this time and nothing else did."""
    moves = Ranges.of(kernel.span for kernel in kernels)
    pairs = zip(moves.starts.clip(begin, end), moves.ends.clip(begin, end), strict=True)
    return float(sum(stop - start - computes.overlap(start, stop) for start, stop in pairs if stop > start))


def _took(
    kernels: Mapping[int, Sequence[Call]],
    computes: Mapping[int, Ranges],
    waits: Mapping[tuple[int, int], float],
    steps: int,
) -> Iterator[Took]:
    """Groups of one size do alike."""
    found: dict[tuple[int, str, str], list[tuple[float, float, float, float]]] = defaultdict(list)
    known = set[tuple[int, str, str]]()
    groups: dict[tuple[int, str, str], set[str]] = defaultdict(set)
    ranks: dict[tuple[int, str, str], set[int]] = defaultdict(set)
    for rank, calls in kernels.items():
        for place, call in enumerate(calls):
            what, span = call.what, call.span
            key, size = (len(what.ranks), what.op, what.phase), len(what.ranks)
            groups[key].add(ranks_key(what.ranks))
            ranks[key].add(rank)
            known |= {key} if (rank, place) in waits else set()
            lasts, waited = span.end - span.start, waits.get((rank, place), 0.0)
            moved = what.bytes * ROUND_TRIPS.get(what.op, 1) * (size - 1) / size
            found[key].append((lasts, lasts - computes[rank].overlap(span.start, span.end), waited, moved))
    for key in sorted(found, key=lambda key: -sum(one[1] for one in found[key])):
        lasts, exposed, waited, moved = (sum(of) for of in zip(*found[key], strict=True))
        many = len(ranks[key]) * steps * 1e6
        rate = moved / max(lasts - waited, 1e-9) * 1e6
        unless = waited / many if key in known else None
        yield Took(tuple(sorted(groups[key])), key[1], key[2], lasts / many, exposed / many, unless, rate)
