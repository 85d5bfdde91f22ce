"""Whether a rank that runs alone leaves the evidence that it leaves among its peers: all fields that a structural law reads.

    python -m tools.preflight_equal -k "fsdp and not tp" --most 8 --out out/equal

Runs each case that can really run here, on all its ranks, and then each of its ranks alone; compares field by field.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from harness import trainers
from harness.evidence.records import Collective, RankEvidence, StepEvidence
from harness.evidence.store import load_run
from harness.preflight.launches import fly
from harness.run.options import Options
from harness.run.run_case import run_case
from harness.run.selection import holds
from harness.spec import case_files
from harness.spec.case import Case
from harness.spec.loading import load_all

Fields = dict[str, Callable[[RankEvidence], Any]]


def of_each_step(read: Callable[[StepEvidence], Any]) -> Callable[[RankEvidence], Any]:
    return lambda evidence: {step.step: read(step) for step in evidence.steps}


def call(one: Collective) -> tuple[Any, ...]:
    """Without the group's name, and of what lies outside of steps nothing."""
    return one.step, one.phase, one.op, one.ranks, one.dtype, one.bytes, one.peer


FIELDS: Fields = {
    "parameters": lambda e: {
        t.fqn: (t.global_shape, t.dtype, t.mesh, t.placements, t.value.shape) for t in e.parameters
    },
    "groups": lambda e: Counter(group.ranks for group in e.groups if len(group.ranks) > 1),
    "wrappers": lambda e: e.structure,
    "collectives in order": lambda e: [call(one) for one in e.collectives if one.step],
    "collectives before and after": lambda e: [call(one) for one in e.collectives if not one.step],
    "pipeline actions": of_each_step(lambda s: s.actions),
    "memory held": of_each_step(lambda s: s.memory),
    "after forward": of_each_step(lambda s: s.after_forward),
    "module calls": of_each_step(lambda s: s.activity.calls),
    "matmuls": of_each_step(lambda s: s.activity.matmuls),
    "attention": of_each_step(lambda s: s.activity.attention),
    "random numbers": of_each_step(lambda s: s.activity.random),
    "hooks on saved tensors": of_each_step(lambda s: s.activity.saved),
    "gradients' shapes": of_each_step(lambda s: {fqn: value.shape for fqn, value in s.gradients.items()}),
    "parameters' shapes": of_each_step(lambda s: {fqn: value.shape for fqn, value in s.parameters.items()}),
    "optimizer state": of_each_step(
        lambda s: {fqn: {key: value.shape for key, value in state.items()} for fqn, state in s.optimizer_state.items()}
    ),
    "copies of weights": of_each_step(lambda s: s.copied),
    "settings": of_each_step(lambda s: s.settings),
    "kept beside": lambda e: Counter((held.shape, held.dtype, held.bytes) for held in e.held or ()),
}


def differences(real: RankEvidence, alone: RankEvidence) -> dict[str, tuple[Any, Any]]:
    """By field, both, where they are not equal."""
    pairs = {name: (read(real), read(alone)) for name, read in FIELDS.items()}
    return {name: pair for name, pair in pairs.items() if pair[0] != pair[1]}


def compared(case: Case, out: Path, ranks: Sequence[int] = ()) -> Counter[str]:
    """By field, how many ranks differ, of all or of these; "examined" counts ranks."""
    folder = out / "alone" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    run_case(case, Options(out=out))
    ranks = ranks or range(case.dims.world_size)
    real, alone = load_run(out / case.name / "run"), fly(case, ranks, folder)
    found = Counter[str]()
    for rank in ranks:
        found["examined"] += 1
        if rank not in real.ranks or rank not in alone.run.ranks:
            found["no evidence"] += 1
            continue
        unequal = differences(real.ranks[rank], alone.run.ranks[rank])
        found.update(unequal.keys())
        for name, (one, other) in unequal.items() if rank in (0, case.dims.world_size - 1) else ():
            print(f"    rank {rank}, {name}: {first_difference(one, other)}")
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(out / case.name, ignore_errors=True)
    return found


def first_difference(one: Any, other: Any) -> str:
    """Where they part, as short as it can be said."""
    if isinstance(one, dict) and isinstance(other, dict):
        key = next(key for key in (one | other) if one.get(key) != other.get(key))
        return f"{key}: {first_difference(one.get(key), other.get(key))}"
    if isinstance(one, list) and isinstance(other, list):
        at = next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
        return f"{len(one)} and {len(other)}; at {at}: {one[at : at + 1]} and {other[at : at + 1]}"
    return f"really {one}, alone {other}"[:400]


def selected(expression: str, most: int) -> Iterator[Case]:
    adapter = trainers.load("llama3")
    for case in load_all(case_files.folder_of(case_files.OURS)):
        if (
            1 < case.dims.world_size <= most
            and adapter.unsupported_alone(case) is None
            and holds(expression, case.name)
        ):
            yield case


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-k", dest="expression", default="", metavar="EXPR")
    parser.add_argument("--most", type=int, default=8, metavar="N", help="ranks of a case; default 8")
    parser.add_argument("--out", type=Path, default=Path("out/equal"))
    args = parser.parse_args()
    unequal = 0
    for case in selected(args.expression, args.most):
        found = compared(case, args.out)
        rest = {name: n for name, n in found.items() if name != "examined"}
        unequal += bool(rest)
        said = ", ".join(f"{name} on {n}" for name, n in rest.items()) or f"all {len(FIELDS)} fields equal"
        print(f"{case.name}: {found['examined']} ranks, {said}", flush=True)
    return int(unequal > 0)


if __name__ == "__main__":
    sys.exit(main())
