"""Packing: in which order cases fill a machine, and which of them are one shard's, by how long they took before. Pure."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass

from harness.core.case.case import Case, CaseError
from harness.core.report.outcome import largest_world_size
from harness.core.run.selection import count_processes
from harness.core.run.verdicts import RecordedRun


@dataclass(frozen=True)
class CaseLoad:
    """The load of a case on a machine: so many slots for so many seconds."""

    name: str
    """Name of the case."""
    slots: int
    """Slots that it takes at once."""
    seconds: float
    """Seconds for which it takes them, remembered or estimated."""

    @property
    def slot_seconds(self) -> float:
        return self.slots * self.seconds


def remembered_seconds(
    runs: Iterable[RecordedRun], *, trainer: str, device: str, machine: str = ""
) -> dict[str, float]:
    """Return the seconds that each case took when it last ended, by name; a run on this machine counts before those on
    others.

    Runs of another trainer or device are left out. trainer: its name (`verdicts.name_of_trainer`).
    """
    similar_runs = [run for run in runs if (run.trainer, run.begins.get("device")) == (trainer, device)]
    # it is stable: the latest of ours comes last
    runs_here_last = sorted(similar_runs, key=lambda run: run.begins.get("machine") == machine)
    seconds: dict[str, float] = {}
    for run in runs_here_last:
        seconds |= {name: outcome.seconds for name, outcome in run.outcomes.items() if outcome.seconds}
    return seconds


def estimate_loads(cases: Sequence[Case], seconds: Mapping[str, float], slots: int | None = None) -> list[CaseLoad]:
    """Return the load of each case: its name, the slots that it takes, and its seconds.

    seconds: by name of the cases that are known. slots: of the machine; no case takes more, unless it is None. An unknown
    case takes its number of processes times the known cases' mean seconds per process. It is one second per process if no
    case is known.
    """
    timed_cases = [case for case in cases if case.name in seconds]
    each = (
        sum(seconds[case.name] for case in timed_cases) / sum(map(count_processes, timed_cases)) if timed_cases else 1.0
    )
    return [
        CaseLoad(
            case.name,
            min(largest_world_size(case), slots or largest_world_size(case)),
            seconds.get(case.name, each * count_processes(case)),
        )
        for case in cases
    ]


# ---- a machine

LOAD_ORDERS: tuple[Callable[[CaseLoad], tuple[float, ...]], ...] = (
    lambda load: (-load.slots, -load.seconds),
    lambda load: (-load.slot_seconds, -load.slots),
    lambda load: (-load.seconds, -load.slots),
)
"""Sort keys: widest first leaves no gaps, but a load that is long and narrow must not begin last."""


def order_loads(case_loads: Sequence[CaseLoad], slots: int) -> list[CaseLoad]:
    """Return the loads, largest first by slots, by seconds or by both: in the one of these orders that ends soonest."""
    orders = [sorted(case_loads, key=lambda load: (*order(load), load.name)) for order in LOAD_ORDERS]
    return min(orders, key=lambda order: makespan(order, slots))


def order_for_early_answers(order: Sequence[CaseLoad], first: Sequence[str], long: Container[str]) -> list[CaseLoad]:
    """Return the loads in an order in which verdicts come soon. first: names of those that begin, in this order.

    long: names of cases whose references take minutes of one core each. They are spread evenly over the first half of
    the others: so they run beside others, few at a time, and none is left for the end.
    """
    by_name = {load.name: load for load in order}
    later_loads = [load for load in order if load.name not in first]
    begin_early = [load for load in later_loads if load.name in long]
    others = [load for load in later_loads if load.name not in long]
    spread = list(others)
    for number, load in enumerate(begin_early):
        position = number * (len(others) // 2) // len(begin_early) + number
        spread.insert(position, load)
    return [*(by_name[name] for name in first), *spread]


def makespan(order: Iterable[CaseLoad], slots: int) -> float:
    """Return the seconds until the last load ends, where each begins as soon as its slots are free, and none before those
    ahead of it."""
    free = slots
    moment = 0.0
    running = [(0.0, 0)]
    for load in order:
        while free < load.slots:
            moment, given_back = heapq.heappop(running)
            free += given_back
        free -= load.slots
        heapq.heappush(running, (moment + load.seconds, load.slots))
    return max(end for end, _ in running)


# ---- several machines


def cases_of_shard(cases: Sequence[Case], seconds: Mapping[str, float], shard: str) -> list[Case]:
    """Return part I of N of the cases, "I/N", in their order; it may be empty. Raises CaseError for any other text.

    Every machine that is given the same finds the same parts, which are disjoint, complete and about equally long.
    """
    part, parts = parse_shard(shard)
    filled = [0.0] * parts
    chosen_names = set()
    for load in sorted(estimate_loads(cases, seconds), key=lambda load: (-load.slot_seconds, load.name)):
        lightest = filled.index(min(filled))
        filled[lightest] += load.slot_seconds
        if lightest == part - 1:
            chosen_names.add(load.name)
    return [case for case in cases if case.name in chosen_names]


def parse_shard(shard: str) -> tuple[int, int]:
    """Return I and N of a shard, "I/N". Raises CaseError unless both are numbers and 1 <= I <= N."""
    words = shard.split("/")
    if len(words) != 2 or not all(word.isdecimal() for word in words) or not 1 <= int(words[0]) <= int(words[1]):
        raise CaseError(f"--shard {shard}: expected I/N, the I-th of N parts, as in 2/5")
    return int(words[0]), int(words[1])
