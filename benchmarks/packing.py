"""How busy a machine's slots are while a matrix runs on it: wall time against what its cases take.

    python benchmarks/packing.py pretended --slots 8 --tier default
    python benchmarks/packing.py cases -k "ddp or tp_2"

pretended: the ranks of every selected case sleep on pretended GPUs, for seconds drawn by --seed. The launches are the real
ones, so taking and giving back slots, order and gaps are measured. cases: real ones, on this machine's cores, with -j 1 and as
packed; the reference is there before.
"""

from __future__ import annotations

import argparse
import os
import random
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from harness.core.case.case import Case
from harness.core.case.case_files import BUILTIN_WORD, folder_of
from harness.core.case.loading import load_all
from harness.core.launch import Job, Pool, default_server, launch, slot_pool
from harness.core.report.outcome import Outcome
from harness.core.report.progress import Progress
from harness.core.run.matrix import run_all
from harness.core.run.options import Options
from harness.core.run.packing import CaseLoad, estimate_loads, makespan, order_loads
from harness.core.run.reference_cache import reference_folder
from harness.core.run.selection import select_matching, select_tier


def sleep(options: dict[str, float]) -> None:
    """Sleep for `seconds`: the entry that a pretended rank runs."""
    time.sleep(options["seconds"])


@dataclass
class Use:
    """The launches that held slots: when each began and ended (monotonic), and how many slots it had."""

    held: list[tuple[float, float, int]] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, began: float, ended: float, slots: int) -> None:
        with self.lock:
            self.held.append((began, ended, slots))

    def busy(self, slots: int, until: float) -> float:
        """Return the share of all slots' time that was used, from the first launch to `until`."""
        start = min(began for began, _, _ in self.held)
        area = sum(max(0.0, min(ended, until) - began) * width for began, ended, width in self.held)
        return area / (slots * (until - start))


def packed(order: list[CaseLoad], slots: int) -> Use:
    """Run every load as a launch of ranks that sleep, on pretended GPUs, and return when each had its slots."""
    use = Use()
    default_server().wait_until_ready()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(slots + 1) as threads:
        pool = Pool(Path(folder) / "slots", tuple(f"GPU-{number}" for number in range(slots)), has_gpus=True)

        def run(load: CaseLoad) -> None:
            watch: list[float] = []
            job = Job(Path(folder) / load.name, load.slots, "benchmarks.packing:sleep", {"seconds": load.seconds})
            exits = launch(job, pool=pool, began=lambda: watch.append(time.monotonic()))
            assert all(exit.how == "ok" for exit in exits), exits
            use.add(watch[0], time.monotonic(), load.slots)

        list(threads.map(run, order))
    return use


def pretended(cases: list[Case], slots: int, seed: int) -> str:
    """Return a text on how busy pretended GPUs are, with seconds for each case drawn by `seed`."""
    draw = random.Random(seed)
    seconds = {case.name: draw.uniform(0.5, 4.0) for case in cases}
    order = order_loads(estimate_loads(cases, seconds, slots), slots)
    use = packed(order, slots)
    first, last = min(began for began, _, _ in use.held), max(ended for _, ended, _ in use.held)
    tail = sorted(began for began, _, _ in use.held)[
        -1
    ]  # until the last case begins there was something to fill slots with
    alone = sum(load.seconds for load in order)
    return (
        f"{len(order)} cases on {slots} pretended GPUs: {last - first:.1f} s; one after the other {alone:.1f} s;"
        f" by arithmetic {makespan(order, slots):.1f} s\n"
        f"slots busy: {use.busy(slots, tail):.1%} until the last case begins, {use.busy(slots, last):.1%} in all"
    )


def real(cases: list[Case], folder: Path, jobs: int) -> str:
    """Run the cases here, `jobs` at a time, and return a text on how busy the slots were."""
    slots = len(slot_pool("cpu").slots)
    done: list[Outcome] = []
    with open(os.devnull, "w") as nowhere:
        progress = Progress({case.name: 1 for case in cases}, nowhere)
        run_all(cases, Options(out=folder), jobs=jobs, progress=progress, ended=done.append)
    area = sum(outcome.seconds * min(outcome.ranks, slots) for outcome in done)
    alone, wall = sum(outcome.seconds for outcome in done), progress.elapsed_seconds()
    return (
        f"-j {jobs}: {len(done)} cases ({sum(outcome.failed for outcome in done)} failed) in {wall:.1f} s, had slots for "
        f"{alone:.1f} s in all; {area / slots / wall:.1%} of {slots} slots busy"
    )


def main() -> None:
    """Print how busy slots are, of pretended or real cases."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pretended", "cases"))
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("-k", dest="expression", default="")
    parser.add_argument("--tier", default="default")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    cases = select_tier(select_matching(load_all(folder_of(BUILTIN_WORD)), args.expression), args.tier)
    if args.what == "pretended":
        return print(pretended(cases, args.slots, args.seed))
    with tempfile.TemporaryDirectory() as folder:
        default_server().wait_until_ready()
        for case in cases:
            reference_folder(case, Options(out=Path(folder)))
        slots = len(slot_pool("cpu").slots)
        named = {case.name: case for case in cases}
        ordered = [named[load.name] for load in order_loads(estimate_loads(cases, {}, slots), slots)]
        for jobs in (1, slots + 1):
            print(real(ordered, Path(folder), jobs), flush=True)


if __name__ == "__main__":
    main()
