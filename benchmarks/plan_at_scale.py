"""Seconds and memory of plans of thousands of ranks: `python -m benchmarks.plan_at_scale`. Its output is in docs/preflight.md.

It plans all fields of all ranks of each layout of layouts/, in a separate process. Then it plans 512 ranks twice in one
process: once by kinds of ranks, once with every rank as a separate kind. The latter is the cost of a plan that looks at every
rank.
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import fields
from unittest import mock

from harness.core.case import case_files
from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all
from harness.core.plan import make_plan as module
from harness.core.plan.kinds import PerRank
from harness.core.plan.make_plan import make_plan
from harness.core.plan.plan import Plan
from harness.core.report.layout_text import rank_classes

ROUNDS = 3
SIDE_BY_SIDE = "llama3_70b_512"


def looked_at(plan: Plan) -> int:
    """Compute every field of every rank of a plan, and return how many there are."""
    values = [getattr(plan, field.name) for field in fields(plan)]
    return sum(len([value[rank] for rank in value]) for value in values if isinstance(value, PerRank))


def one_layout(case: Case) -> None:
    """Plan a case, and print its ranks, kinds, fields, processor seconds and memory of this process."""
    began = time.process_time()
    plan = make_plan(case)
    count = looked_at(plan)
    seconds, used = time.process_time() - began, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    numbers = f"{case.dims.world_size:>7,} ranks {len(rank_classes(plan)):>4} kinds {count:>8,} fields"
    print(f"{case.name:<24}{numbers} {seconds:6.2f} s of processor {used / 1e6:6.0f} MB", flush=True)


def seconds_of(case: Case) -> float:
    """Return the processor seconds of planning all fields of all ranks of a case."""
    began = time.process_time()
    looked_at(make_plan(case))
    return time.process_time() - began


def of_its_own(kinds: Mapping[int, object], make: object) -> PerRank[object]:
    return PerRank({rank: rank for rank in kinds}, make)  # type: ignore[arg-type]


def main() -> None:
    """Print the cost of planning each layout of layouts/, or of the one that is named; then compare kinds with single
    ranks."""
    layouts = load_all(case_files.LAYOUTS)
    if sys.argv[1:]:
        one_layout(find_case(sys.argv[1], layouts))
        return
    for case in layouts:
        subprocess.run([sys.executable, "-m", "benchmarks.plan_at_scale", case.name], check=True)
    case, shared, alone = find_case(SIDE_BY_SIDE, layouts), [], []
    for _ in range(ROUNDS):
        shared.append(seconds_of(case))
        with mock.patch.object(module, "PerRank", of_its_own):
            alone.append(seconds_of(case))
    print(f"{case.name}: by kinds {min(shared):.3f} s, every rank {min(alone):.2f} s, ratio", end=" ")
    print(f"{statistics.median(b / a for a, b in zip(shared, alone, strict=True)):.0f}")


if __name__ == "__main__":
    main()
