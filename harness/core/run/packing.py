"""In which order cases fill a machine, and which part of them is one shard's; by how long they took before. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.core.case.case import Case, CaseError
from harness.core.report.outcome import ranks_of
from harness.core.run.selection import weight
from harness.core.run.verdicts import RecordedRun


@dataclass(frozen=True)
class Load:
    """What a case takes: so many slots for so many seconds."""

    name: str
    slots: int
    seconds: float

    @property
    def area(self) -> float:
        return self.slots * self.seconds


def remembered(runs: Iterable[RecordedRun], *, trainer: str, device: str, machine: str = "") -> dict[str, float]:
    """trainer: its name (`verdicts.name_of_trainer`). How many seconds each case took when it last ended, on this machine
    rather than on others."""
    mine = [run for run in runs if (run.trainer, run.begins.get("device")) == (trainer, device)]
    here = sorted(
        mine, key=lambda run: run.begins.get("machine") == machine
    )  # it is stable: the latest of ours comes last
    return {name: one.seconds for run in here for name, one in run.outcomes.items() if one.seconds}


def loads(cases: Sequence[Case], seconds: Mapping[str, float], slots: int | None = None) -> list[Load]:
    """What the cases take, on a machine of so many slots. An unknown case takes what known ones take by processes."""
    known = [case for case in cases if case.name in seconds]
    each = sum(seconds[case.name] for case in known) / sum(map(weight, known)) if known else 1.0
    return [
        Load(case.name, min(ranks_of(case), slots or ranks_of(case)), seconds.get(case.name, each * weight(case)))
        for case in cases
    ]


# ---- a machine

ORDERS: tuple[Callable[[Load], tuple[float, ...]], ...] = (
    lambda load: (-load.slots, -load.seconds),
    lambda load: (-load.area, -load.slots),
    lambda load: (-load.seconds, -load.slots),
)
"""Widest first leaves no gaps; but what is long and narrow must not begin last."""


def in_order(found: Sequence[Load], slots: int) -> list[Load]:
    """Largest first, in that sense of it that ends soonest."""
    orders = [sorted(found, key=lambda load: (*order(load), load.name)) for order in ORDERS]
    return min(orders, key=lambda order: makespan(order, slots))


def answering_soon(order: Sequence[Load], first: Sequence[str], long: Container[str]) -> list[Load]:
    """Return the loads in an order in which verdicts come soon.

    `first` begin, in their order. The references of `long` take minutes of one core each. They are spread evenly over the first
    half of the others: so they run beside others, few at a time, and none is left for the end.
    """
    by_name = {load.name: load for load in order}
    rest = [load for load in order if load.name not in first]
    begin_early = [load for load in rest if load.name in long]
    others = [load for load in rest if load.name not in long]
    spread = list(others)
    for number, load in enumerate(begin_early):
        place = number * (len(others) // 2) // len(begin_early) + number
        spread.insert(place, load)
    return [*(by_name[name] for name in first), *spread]


def makespan(order: Iterable[Load], slots: int) -> float:
    """Seconds until the last one ends, where each begins as soon as its slots are free, and none before those ahead of it."""
    free, now, running = slots, 0.0, [(0.0, 0)]
    for load in order:
        while free < load.slots:
            now, given_back = heapq.heappop(running)
            free += given_back
        free -= load.slots
        heapq.heappush(running, (now + load.seconds, load.slots))
    return max(end for end, _ in running)


# ---- several machines


def share(cases: Sequence[Case], seconds: Mapping[str, float], shard: str) -> list[Case]:
    """Part I of N of the cases, "I/N", in their order. Every machine that is given the same finds the same parts, which are
    disjoint, complete and about equally long. Raises CaseError."""
    part, parts = parsed(shard)
    filled = [0.0] * parts
    mine = set()
    for load in sorted(loads(cases, seconds), key=lambda load: (-load.area, load.name)):
        lightest = filled.index(min(filled))
        filled[lightest] += load.area
        if lightest == part - 1:
            mine.add(load.name)
    return [case for case in cases if case.name in mine]


def parsed(shard: str) -> tuple[int, int]:
    """Raises CaseError."""
    words = shard.split("/")
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not 1 <= int(words[0]) <= int(words[1]):
        raise CaseError(f"--shard {shard}: expected I/N, the I-th of N parts, as in 2/5")
    return int(words[0]), int(words[1])
