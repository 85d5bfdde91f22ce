"""Whether a rank that runs alone leaves the evidence that it leaves among its peers: all fields that a structural check reads.

    python -m tools.preflight_equal -k "fsdp and not tp" --most 8 --evidence out --out out/equal

Takes the evidence that `harness matrix --out out` left of a case, or runs it, on all its ranks; then runs each of its ranks
alone, and compares field by field. OUT/equal.json has a row for each case; one that has a row there is not compared again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from harness import trainers
from harness.evidence.records import Collective, RankEvidence, Run
from harness.evidence.step import StepEvidence
from harness.evidence.store import CASE_FILE, load_run
from harness.preflight.launches import fly
from harness.run.options import Options
from harness.run.run_case import run_case
from harness.run.selection import holds
from harness.spec import case_files
from harness.spec.case import Case, to_json
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


def compared(case: Case, out: Path, ranks: Sequence[int] = (), evidence: Path | None = None) -> Counter[str]:
    """By field, how many ranks differ, of all or of these; "examined" counts ranks. evidence: where the case was run."""
    folder = out / "alone" / case.name
    shutil.rmtree(folder, ignore_errors=True)
    ranks = ranks or range(case.dims.world_size)
    real, alone = really(case, out, evidence), fly(case, ranks, folder)
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
    return found


def really(case: Case, out: Path, evidence: Path | None) -> Run:
    """What the case left: there, if it is the same case; else what it leaves now, and is then deleted."""
    if evidence is not None and _is_of(case, evidence / case.name / CASE_FILE):
        return load_run(evidence / case.name / "run")
    run_case(case, Options(out=out))
    run = load_run(out / case.name / "run")
    shutil.rmtree(out / case.name, ignore_errors=True)
    return run


def _is_of(case: Case, file: Path) -> bool:
    return file.exists() and json.loads(file.read_text(encoding="utf-8")) == json.loads(json.dumps(to_json(case)))


def spread(world: int, most: int) -> Sequence[int]:
    """So many ranks, the first and the last among them; all where there are no more."""
    return range(world) if world <= most else sorted({round(at * (world - 1) / (most - 1)) for at in range(most)})


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
    parser.add_argument(
        "--of-each", type=int, default=32, metavar="N", help="ranks of a case that run alone; default 32"
    )
    parser.add_argument("--evidence", type=Path, metavar="DIR", help="of a matrix that ran already")
    parser.add_argument("--out", type=Path, default=Path("out/equal"))
    args = parser.parse_args()
    file = args.out / "equal.json"
    rows = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    stored = args.evidence or args.out
    for case in sorted(selected(args.expression, args.most), key=lambda case: not (stored / case.name).exists()):
        if case.name not in rows:
            rows[case.name] = compared(case, args.out, spread(case.dims.world_size, args.of_each), args.evidence)
            print(f"{case.name}: {said_of(rows[case.name])}", flush=True)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    unequal = [name for name, found in rows.items() if set(found) != {"examined"}]
    ranks = sum(found["examined"] for found in rows.values())
    print(f"{len(rows)} cases, {ranks} ranks; {len(unequal)} cases unequal: {', '.join(unequal)}")
    return int(bool(unequal))


def said_of(found: Mapping[str, int]) -> str:
    rest = ", ".join(f"{name} on {n}" for name, n in found.items() if name != "examined")
    return f"{found['examined']} ranks, {rest or f'all {len(FIELDS)} fields equal'}"


if __name__ == "__main__":
    sys.exit(main())
