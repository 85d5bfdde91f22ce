"""Which faults of the catalogue two recordings notice, without an adapter: run as scripts under `harness record --same-as`.

    python -m benchmarks.recorded_numbers OUT [-k WORDS]

Faults count that break `gradients` or `update` in the matrix. The first recording is of one process that accumulates over
passes of one sample each; it is made once for each model and recipe. Left out are cases that resume a checkpoint, compute in 8
bits, or cast by FSDP2, which one process cannot. The first cause of each comparison is printed, and that of the matrix.
What OUT has is not recorded again.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from harness.core.case.case import Case, to_json
from harness.core.case.dims import ParallelDims
from harness.core.case.features import Features
from harness.core.case.loading import from_json, load_all
from harness.faults import load_fault
from harness.faults.attempt import Attempt, accepted_attempts

OF_NUMBERS = {"gradients", "update"}
SECONDS = 300


def job(file: Path, fault: str) -> None:
    """Train the case of a file, with a fault if one is named, as a script does that uses no part of the harness but its
    trainer."""
    from harness.core.trainers.llama3 import adapter

    case = from_json(json.loads(file.read_text(encoding="utf-8")))
    if fault:
        load_fault(fault).apply(lambda: None)
    try:
        adapter.start(case, None, "cpu").train(case.training.steps)
    finally:
        adapter.stop()


def alone(case: Case) -> Case:
    """Return the case of the same training in one process, a sample a pass."""
    features = Features(accumulation=case.training.global_batch)
    return dataclasses.replace(case, name="alone", dims=ParallelDims(), features=features, runs=1)


def recorded(folder: Path, case: Case, fault: str = "", same_as: Path | None = None) -> None:
    """Record one job into the folder, compared with `same_as` if given; do nothing if it was recorded before.

    subprocess.TimeoutExpired after SECONDS.
    """
    if (folder / "recording.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    file = folder.with_suffix(".json")
    file.write_text(json.dumps(to_json(case)), encoding="utf-8")
    ranks = case.dims.world_size
    start = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *start, "-m", "benchmarks.recorded_numbers", "--job", str(file), fault]
    beside = ["--same-as", str(same_as)] if same_as else []
    words = [sys.executable, "-m", "harness", "record", *beside, "-o", str(folder), "--", *command]
    log = folder.with_suffix(".log")
    with log.open("w", encoding="utf-8") as out:
        subprocess.run(words, stdout=out, stderr=out, timeout=SECONDS, check=False)


def compared(one: Path, other: Path) -> dict[str, Any]:
    """Return the document of `harness compare --numbers` on two recordings."""
    words = [sys.executable, "-m", "harness", "compare", "--numbers", "--json", str(one), str(other)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=False).stdout)


def main() -> None:
    """Record the faults that change numbers, print the causes, and count the verdicts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("-k", default="", help="a part of CASE+FAULT")
    args = parser.parse_args()
    cases, count = {case.name: case for case in load_all()}, Counter[str]()
    references: dict[str, Path] = {}
    for attempt in accepted_attempts():
        case, name = cases[attempt.case], f"{attempt.case}+{attempt.fault}"
        recipe = case.training
        if (
            args.k in name
            and OF_NUMBERS & {*attempt.broken}
            and not (case.resume or recipe.quantize or recipe.compute_dtype)
        ):
            one = alone(case)
            key = hashlib.sha256(json.dumps(to_json(one), sort_keys=True).encode()).hexdigest()[:12]
            if key not in references:
                references[key] = args.out / key
                recorded(references[key], one)
            count[_noticed(args.out / name, references[key], case, attempt)] += 1
    print(dict(count))


def _noticed(folder: Path, reference: Path, case: Case, attempt: Attempt) -> str:
    """Record a fault and print its cause.

    Return the verdict, and ", named alike" if the cause's kind is one of the matrix's.
    """
    try:
        recorded(folder, case, attempt.fault, reference)
    except subprocess.TimeoutExpired:
        return "timeout"
    found = compared(reference, folder)
    cause = found.get("cause") or {}
    alike = cause.get("kind") in attempt.kinds
    word = f"{found.get('verdict', 'nothing')}{', named alike' * alike}"
    print(f"{word:24} {folder.name}\n    here   {cause.get('kind', '')}: {found.get('text', '')}", flush=True)
    print(f"    matrix {', '.join(attempt.kinds)}: {attempt.cause}", flush=True)
    return word


if __name__ == "__main__":
    if sys.argv[1:2] == ["--job"]:
        job(Path(sys.argv[2]), *sys.argv[3:] or [""])
    else:
        main()
