"""Which faults of the catalogue that change structure are caught on one rank of a large layout that runs alone.

    python -m tools.preflight_faults --ranks 512 --out out/preflight_faults.json -k hsdp

Each fault's own case, its data ranks made as many as the world needs, and a model wide enough for them. A fault is caught where
a check fails that also breaks in the matrix; named, where the cause has the same name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import sys
from pathlib import Path

from harness import trainers
from harness.checks import judging
from harness.evidence.provided import ALONE
from harness.faults import Fault, all_faults
from harness.judge.result import Verdict
from harness.preflight.judging import judged
from harness.preflight.launches import fly
from harness.reference.config import ModelConfig
from harness.report.cause_text import diagnosis_line
from harness.run.selection import holds
from harness.spec.case import Case
from harness.spec.loading import find_case, load_all

WIDE = ModelConfig("wide", dim=1024, n_heads=16, n_kv_heads=8, vocab_size=4096, ffn_dim=2048)


def widened(case: Case, ranks: int) -> Case:
    """The same case over so many ranks: more of them share the data."""
    dims = case.dims
    dims = dataclasses.replace(dims, dp_shard=dims.dp_shard * (ranks // dims.world_size))
    batch = case.training.global_batch * dims.dp // case.dims.dp
    model = dataclasses.replace(WIDE, n_layers=case.model.n_layers, dropout=case.model.dropout)
    training = dataclasses.replace(case.training, global_batch=batch)
    return dataclasses.replace(case, dims=dims, model=model, training=training)


def structural(fault: Fault) -> list[str]:
    return [check for check in fault.caught_by if check in judging(ALONE) and check != "completed"]


def tried(fault: Fault, case: Case, folder: Path) -> dict[str, str]:
    """On one rank of the second half; what never comes about there, on the first four."""
    for ranks in ((case.dims.world_size // 2 + 1,), (0, 1, 2, 3)):
        shutil.rmtree(folder, ignore_errors=True)
        flown = fly(case, ranks, folder, fault=fault.name)
        if fired := any(evidence.fault for evidence in flown.run.ranks.values()):
            break
    verdicts = judged(case, flown)
    shutil.rmtree(folder, ignore_errors=True)
    broken = [result.check for result in verdicts.results if result.verdict is Verdict.FAIL]
    unknown = [f"{result.check}: {result.note}" for result in verdicts.results if result.verdict is Verdict.UNKNOWN]
    kinds = verdicts.diagnosis.kinds if verdicts.diagnosis else ()
    caught = "caught" if set(broken) & set(structural(fault)) else "other check" if broken else "missed"
    return {
        "fault": fault.name,
        "dims": str(case.dims),
        "ranks": " ".join(map(str, ranks)),
        "verdict": caught if fired or broken else "unknown" if unknown else "unfired",
        "unknown": unknown[0] if unknown else "",
        "broken": " ".join(broken),
        "expected": " ".join(structural(fault)),
        "named": "as in the matrix" if fault.named in kinds else ", ".join(kinds),
        "first line": diagnosis_line(verdicts.diagnosis),
        "seconds": f"{flown.seconds:.0f}",
    }


def without(case: Case, folder: Path) -> str:
    """What the case breaks by itself: what a fault is caught by is not among that."""
    shutil.rmtree(folder, ignore_errors=True)
    verdicts = judged(case, fly(case, (case.dims.world_size // 2 + 1,), folder))
    shutil.rmtree(folder, ignore_errors=True)
    unlike = (one for one in verdicts.results if one.verdict in (Verdict.FAIL, Verdict.UNKNOWN))
    return " ".join(f"{one.check}: {one.verdict}" for one in unlike)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=512)
    parser.add_argument("-k", dest="expression", default="", metavar="EXPR")
    parser.add_argument("--out", type=Path, default=Path("out/preflight_faults.json"))
    args = parser.parse_args()
    cases, adapter = load_all(), trainers.load("llama3")
    wanted = [
        (fault, widened(case, args.ranks))
        for fault in all_faults()
        if structural(fault) and holds(args.expression, fault.name)
        if adapter.unsupported_alone(case := find_case(fault.case, cases)) is None
    ]
    rows, alone = [], {}
    for fault, case in wanted:
        if case.name not in alone:
            alone[case.name] = without(case, args.out.with_suffix("") / case.name)
        row = {"without": alone[case.name]} | tried(fault, case, args.out.with_suffix("") / fault.name)
        rows.append(row)
        print(
            f"{row['verdict']:<9} {row['fault']}: {row['broken']}; {row['first line']} {row['unknown']}",
            flush=True,
        )
        args.out.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    return int(any(row["verdict"] != "caught" or row["without"] for row in rows))


if __name__ == "__main__":
    sys.exit(main())
