"""How often the right rank is blamed, for the right reason, when one dies or diverges at a random moment of a small real job.

    python benchmarks/random_deaths.py kills --times 100 --seed 1
    python benchmarks/random_deaths.py divergences --times 60 --seed 1

Each job has two to four ranks, which issue collectives over two groups and send to each other. What happens, on which rank and
when is drawn; so are the launcher and whether the groups give up before the job's time limit. A divergence that nothing came of
(gloo pairs what does not belong together) is counted as silent and drawn again: the check `collective_order` sees it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from harness.launch import Exit, Job, current, launch
from harness.probe.collectives import CollectiveRecorder

STEPS = 3
SIGNALS = ("SIGKILL", "SIGTERM", "SIGABRT", "SIGSEGV", "SIGSTOP")
HANGS = ("sleeps", "sleeps_in_c", "holds_the_gil", "waits_for_an_event")
ENDS = ("raises", "raises_odd_text", "raises_without_text", "leaves", "leaves_at_once", "exits_5", "exits_at_once_5")
DIVERGENCES = (
    *("skips", "swaps", "resizes", "retypes", "changes_root", "adds", "skips_a_group", "swaps_groups"),
    *("comes_late", "joins_late", "thread_skips", *HANGS[1:3]),
)
ENDLESS = 600


@dataclass(frozen=True)
class Drawn:
    """What happens to one rank of one job."""

    what: str  # of SIGNALS, HANGS, ENDS or DIVERGENCES
    rank: int
    world: int
    step: int  # in which it happens; 0: before the group exists
    event: int  # of the step's program, before which it happens
    launcher: str
    group_timeout: float  # seconds
    seed: int


# ---- what a rank runs


def program(rank: int, world: int) -> list[tuple[str, int, int, torch.dtype, int]]:
    """Return what a step issues: operator, group, numbers, dtype, root."""
    return [
        ("all_reduce", 0, 64, torch.float32, 0),
        ("broadcast", 1, 32, torch.float32, 0),
        ("all_gather", 1, 16, torch.float32, 0),
        ("barrier", 0, 0, torch.float32, 0),
        ("reduce", 0, 8, torch.float64, 1),
        ("exchange", 0, 8, torch.float32, 0),
        ("monitored_barrier", 0, 0, torch.float32, 0),
        ("all_reduce", 1, 128, torch.float64, 0),
    ]


def rank(options: dict[str, Any]) -> None:
    """The entry."""
    drawn, this, world = Drawn(**options), int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    mine, where = drawn.rank == this, [0]
    record = current()
    assert record is not None

    def note(call: Any) -> None:
        what = (call.group, call.ranks, call.seq, call.op, call.bytes, call.step, call.phase)
        record.issue(*what, call.peer, call.root, call.dtype)

    CollectiveRecorder(lambda: (where[0], "forward"), note).install()
    time.sleep(0.05)
    if mine and drawn.step == 0:
        happens(drawn)
    place = {"init_method": os.environ.get("INIT_METHOD", "env://"), "rank": this, "world_size": world}
    dist.init_process_group("gloo", **place)
    groups = [dist.group.WORLD, *made_groups(drawn if mine else None, world)]
    threads = drawn.what == "thread_skips"
    for step in range(1, STEPS + 1):
        where[0] = step
        todo = todo_of(drawn if mine and drawn.step == step else None, this, world)
        if not threads:
            for each in todo:
                each(groups)
            continue
        second = threading.Thread(target=lambda todo=todo: [each(groups) for each in todo if each.group == 1])
        second.start()
        for each in todo:
            if each.group == 0:
                each(groups)
        second.join()
    dist.destroy_process_group()


def made_groups(drawn: Drawn | None, world: int) -> list[Any]:
    """Two more groups, the first of which is used."""
    members = [list(range(world)), [0, 1]]
    if drawn and drawn.what == "skips_a_group":
        members = members[:1] if drawn.event % 2 else members[1:]
    if drawn and drawn.what == "swaps_groups":
        members = members[::-1]
    made = [dist.new_group(each) for each in members]
    return made[::-1] if drawn and drawn.what == "swaps_groups" else made


class Event:
    def __init__(self, op: str, group: int, numbers: int, dtype: torch.dtype, root: int, this: int, world: int) -> None:
        self.op, self.group, self.numbers, self.dtype, self.root = op, group, numbers, dtype, root
        self.this, self.world = this, world

    def __call__(self, groups: list[Any]) -> None:
        time.sleep(0.005)
        group, value = groups[min(self.group, len(groups) - 1)], torch.ones(self.numbers, dtype=self.dtype)
        if self.op == "all_gather":
            dist.all_gather([torch.empty_like(value) for _ in range(self.world)], value, group=group)
        elif self.op == "barrier":
            dist.barrier(group=group)
        elif self.op == "monitored_barrier":
            dist.monitored_barrier(group=group)
        elif self.op == "exchange":
            sent = dist.isend(value, (self.this + 1) % self.world)
            dist.recv(torch.empty_like(value), (self.this - 1) % self.world)
            sent.wait()
        elif self.op in ("broadcast", "reduce"):
            getattr(dist, self.op)(value, self.root, group=group)
        else:
            dist.all_reduce(value, group=group)


class Happening:
    def __init__(self, drawn: Drawn, group: int) -> None:
        self.drawn, self.group = drawn, group

    def __call__(self, groups: list[Any]) -> None:
        happens(self.drawn)


def todo_of(drawn: Drawn | None, this: int, world: int) -> list[Any]:
    """Return the step's events; `drawn`: what happens in it."""
    todo: list[Any] = [Event(*each, this, world) for each in program(this, world)]
    if drawn is None:
        return todo
    at = drawn.event
    if drawn.what in ("skips", "thread_skips"):
        del todo[at]
    elif drawn.what == "swaps":
        todo[at : at + 2] = todo[at : at + 2][::-1]
    elif drawn.what == "resizes":
        todo[at].numbers *= 2
    elif drawn.what == "retypes":
        todo[at].dtype = {torch.float32: torch.float64, torch.float64: torch.float32}[todo[at].dtype]
    elif drawn.what == "changes_root":
        todo[at].root = 1 - todo[at].root
    elif drawn.what == "adds":
        todo.insert(at, Event("all_reduce", 0, 24, torch.float32, 0, this, world))
    else:
        todo.insert(at, Happening(drawn, todo[at].group))
    return todo


class OddText(Exception):
    def __str__(self) -> str:
        raise ValueError("no text")


def happens(drawn: Drawn) -> None:
    if drawn.what in SIGNALS:
        os.kill(os.getpid(), getattr(signal, drawn.what))
        time.sleep(ENDLESS)
    {
        "sleeps": lambda: time.sleep(ENDLESS),
        "sleeps_in_c": lambda: ctypes.CDLL(None).sleep(ENDLESS),
        "holds_the_gil": lambda: ctypes.PyDLL(None).sleep(ENDLESS),
        "waits_for_an_event": lambda: threading.Event().wait(),
        "raises": lambda: raises(ValueError("no such layer")),
        "raises_odd_text": lambda: raises(RuntimeError("no such file: a\udc80b")),
        "raises_without_text": lambda: raises(OddText()),
        "leaves": lambda: sys.exit(0),
        "leaves_at_once": lambda: os._exit(0),
        "exits_5": lambda: sys.exit(5),
        "exits_at_once_5": lambda: os._exit(5),
        "comes_late": lambda: time.sleep(drawn.group_timeout + 0.5),
        "joins_late": lambda: time.sleep(2 * drawn.group_timeout + 1.0),
    }.get(drawn.what, lambda: None)()


def raises(error: BaseException) -> None:
    raise error


# ---- what is drawn, and what it should be blamed for


def draw_one(what: str, draw: random.Random) -> Drawn:
    """A kill before the group exists, or at any event; a divergence likewise, where it can happen at all."""
    kind = draw.choice([*SIGNALS, *HANGS, *ENDS] if what == "kills" else DIVERGENCES)
    world = draw.choice((2, 3, 4))
    step = 0 if kind == "joins_late" or (what == "kills" and draw.random() < 0.3) else draw.randint(1, STEPS)
    step = 0 if kind in HANGS and draw.random() < 0.3 else step
    events = [each for each, told in enumerate(program(0, world)) if possible(kind, told)]
    event = draw.choice(events)
    launcher = draw.choice(("local", "local", "local", "torchrun") if what == "kills" else ("local", "torchrun"))
    late = kind in ("comes_late", "joins_late")
    group_timeout = 6.0 if launcher == "torchrun" else 1.0 if late else draw.choice((1.0, 60.0))
    return Drawn(kind, draw.randrange(world), world, step, event, launcher, group_timeout, draw.randrange(10**6))


def possible(kind: str, event: tuple[str, int, int, torch.dtype, int]) -> bool:
    op, group, numbers, _, _ = event
    return {
        "swaps": op != "all_reduce" or group == 0,  # the last has no successor
        "resizes": numbers > 0,
        "retypes": numbers > 0,
        "changes_root": op in ("broadcast", "reduce"),
        "thread_skips": group == 1,
        "comes_late": True,
    }.get(kind, True)


SYMMETRIC = (
    "skips",
    "thread_skips",
    "swaps",
    "resizes",
    "retypes",
    "changes_root",
    "adds",
    "skips_a_group",
    "swaps_groups",
)
"""Of two ranks that differ so, neither is known to be right."""


def right(drawn: Drawn, exits: list[Exit]) -> bool:
    blamed = [exit for exit in exits if exit.blamed]
    ranks = [exit.rank for exit in blamed]
    exchange = program(0, 2)[drawn.event][0] == "exchange" and drawn.what in ("resizes", "retypes")
    both = exchange and drawn.rank in ranks and len(ranks) == 2
    tie = drawn.what in SYMMETRIC and drawn.world == 2 and ranks == [0, 1]
    if ranks != [drawn.rank] and not both and not tie:
        return False
    return REASONS.get(drawn.what, differs)(next(exit for exit in blamed if exit.rank == drawn.rank))


def differs(exit: Exit) -> bool:
    return any(words in exit.error for words in ("issued ", "waited for it", "each waits for the other"))


def hung(exit: Exit) -> bool:
    return exit.how == "killed" and "in happens" in exit.stack or "waited for it" in exit.error


REASONS: dict[str, Callable[[Exit], bool]] = {
    **{name: lambda exit, name=name: exit.signal == name for name in SIGNALS},  # type: ignore[misc]
    "SIGSTOP": lambda exit: "had been stopped" in exit.error,
    **dict.fromkeys(HANGS, hung),
    "raises": lambda exit: exit.error.startswith("ValueError: no such layer"),
    "raises_odd_text": lambda exit: exit.error.startswith("RuntimeError: no such file: a"),
    "raises_without_text": lambda exit: exit.error.startswith("OddText: "),
    "leaves": lambda exit: exit.how == "ok" and "waited for it" in exit.error,
    "leaves_at_once": lambda exit: exit.how == "ok" and "waited for it" in exit.error,
    "exits_5": lambda exit: exit.code == 5,
    "exits_at_once_5": lambda exit: exit.code == 5,
}


def run_one(drawn: Drawn, folder: Path) -> list[Exit]:
    job = Job(
        Path(tempfile.mkdtemp(dir=folder), "job"),
        drawn.world,
        "random_deaths:rank",
        vars(drawn),
        timeout=4.0 if drawn.launcher == "local" else 60.0,
        group_timeout=drawn.group_timeout,
    )
    return launch(job, drawn.launcher)


def found(what: str, times: int, seed: int, jobs: int, folder: Path) -> Iterator[tuple[Drawn, list[Exit], float]]:
    draw, done = random.Random(f"{what} {seed}"), 0

    def one(drawn: Drawn) -> tuple[Drawn, list[Exit], float]:
        began = time.monotonic()
        return drawn, run_one(drawn, folder), time.monotonic() - began

    with ThreadPoolExecutor(jobs) as pool:
        while done < times:
            for drawn, exits, seconds in pool.map(one, [draw_one(what, draw) for _ in range(times - done)]):
                yield drawn, exits, seconds
                done += not silent(exits)


def silent(exits: list[Exit]) -> bool:
    return all(exit.how == "ok" and not exit.blamed for exit in exits)


def main() -> None:
    parser = argparse.ArgumentParser(
        allow_abbrev=False, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("kills", "divergences"))
    parser.add_argument("--times", type=int, default=100)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="jobs at the same time")
    args = parser.parse_args()
    print(f"{args.times} {args.what}, seed {args.seed}", flush=True)
    counts: dict[str, Counter[str]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for drawn, exits, seconds in found(args.what, args.times, args.seed, args.jobs, Path(folder)):
            outcome = "silent" if silent(exits) else "right" if right(drawn, exits) else "wrong"
            counts.setdefault(drawn.what, Counter())[outcome] += 1
            if outcome == "wrong":
                told = "".join(
                    f"\n    {e.rank} {e.how} {'BLAMED' * e.blamed} {e.error} | {e.last_collective}" for e in exits
                )
                print(f"wrong, {seconds:.1f} s: {drawn}{told}{exits[0].undelivered}", flush=True)
    print(f"{'what':<22}{'right':>6}{'wrong':>6}{'silent':>8}")
    for name, count in [*sorted(counts.items()), ("all", sum(counts.values(), Counter()))]:
        print(f"{name:<22}{count['right']:>6}{count['wrong']:>6}{count['silent']:>8}")


if __name__ == "__main__":
    main()
