"""`make gpu`: all that fits on the GPUs of this machine, in parts of some minutes, and what is left of it as small files.

    python -m tools.gpu                        goes on where the last call stopped, 9 minutes long
    python -m tools.gpu --stage shared -k tp   one stage, and of its cases those that -k selects
    python -m tools.gpu --stage programs       only what follows the cases
    python -m tools.gpu --device cpu           the same without a GPU: how this file is tried where there is none

Stages follow each other: one rank in float64, float32, TF32, bfloat16 and in 8 bits, one rank compiled, then several ranks on
each GPU. At last it runs programs: a model of 1B parameters with and without the recorder, the probe's cost on it, torchtitan,
the catalogue of faults. benchmarks/gpu/DATE-GPU-torchVERSION/ keeps what can be committed:

    machine.json      GPUs, driver, versions, packages that are there and that are not
    verdicts.jsonl    a line for each case of each stage: verdict, cause, seconds of launches and of steps, the allocator's peak
    summary.md        the same as a table
    programs.jsonl    a line for each program: command, exit code, seconds; NAME.txt has what it printed
    cannot_run.txt    what did not run here, and why

A case that has its line is not run again, unless --again. Exit codes as the harness's: 0, 1 a check fails, 2 not all judged.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from harness.core.case.case import Case
from harness.core.case.loading import load_all
from harness.core.case.variants import with_dtype
from harness.core.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.core.evidence.store import EvidenceError, load_run
from harness.core.report.outcome import GREEN_VERDICTS, Outcome
from harness.core.run import communication
from harness.core.run.folders import folder_of
from harness.core.run.matrix import attempt_case
from harness.core.run.options import Options
from harness.core.run.selection import matches_expression
from tools import gpu_machine, gpu_programs

FOLDER = Path("benchmarks/gpu")
VERDICTS, CANNOT_RUN = "verdicts.jsonl", "cannot_run.txt"
PROGRAMS = "programs"
SKIPPED_OR_LOST = ("SKIPPED", "ERROR")


@dataclass(frozen=True)
class Stage:
    """A stage of the run: its name and description, and its cases.

    cases: returns, of all cases, those of the stage in their order. shares: whether all ranks of a case may share one
    GPU.
    """

    name: str
    about: str
    cases: Callable[[Sequence[Case]], list[Case]]
    shares: bool = False


def one_rank_cases(cases: Sequence[Case]) -> list[Case]:
    """Return the cases of which all launches have one rank."""
    return [case for case in cases if all(one.dims.world_size == 1 for one in case.launches.values())]


def plain(cases: Sequence[Case], dtype: str) -> list[Case]:
    """Return the cases of one rank in this dtype, without those that are quantized or compiled."""
    return [
        with_dtype(case, dtype)
        for case in one_rank_cases(cases)
        if not (case.training.quantize or case.features.compile)
    ]


def in_tf32(cases: Sequence[Case]) -> list[Case]:
    """Return the cases of one rank that compute in float32, with TF32 on."""
    whole = [case for case in plain(cases, "float32") if not case.training.compute_dtype]
    return [dataclasses.replace(case, training=dataclasses.replace(case.training, tf32=True)) for case in whole]


def quantized(cases: Sequence[Case]) -> list[Case]:
    """Return the cases of one rank in 8 bits."""
    return [case for case in one_rank_cases(cases) if case.training.quantize]


def compiled(cases: Sequence[Case]) -> list[Case]:
    """Return the cases of one rank with torch.compile."""
    return [case for case in one_rank_cases(cases) if case.features.compile]


def shared(cases: Sequence[Case]) -> list[Case]:
    """Return the default tier's cases that have several ranks in some launch, the fewest ranks first."""
    chosen = [case for case in cases if case.tier == "default" and case not in one_rank_cases(cases)]
    return sorted(chosen, key=lambda case: case.dims.world_size)


STAGES = (
    Stage("float64", "one rank", lambda cases: plain(cases, "float64")),
    Stage("float32", "one rank", lambda cases: plain(cases, "float32")),
    Stage("tf32", "one rank, float32 rounded to TF32 as it is multiplied", in_tf32),
    Stage("bfloat16", "one rank", lambda cases: plain(cases, "bfloat16")),
    Stage("8 bits", "one rank, float8 and MXFP8", quantized),
    Stage("compiled", "one rank, torch.compile", compiled),
    Stage("shared", "several ranks on each GPU, as the cases are", shared, shares=True),
    Stage("shared float32", "several ranks, in float32", lambda c: [with_dtype(s, "float32") for s in shared(c)], True),
)


# ---- running


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all that is left, write the results into a folder, print them, and return the exit code."""
    args = parsed(arguments)
    machine = gpu_machine.describe_machine(args.device)
    print(*gpu_machine.lines(machine), sep="\n", flush=True)
    if args.device == "cuda" and not machine["gpus"]:
        print("no GPU is here: nothing was run")
        return NOT_JUDGED
    folder = args.folder or newest(machine) or FOLDER / f"{datetime.now(UTC):%Y-%m-%d}-{gpu_machine.label(machine)}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "machine.json").write_text(json.dumps(machine, indent=1) + "\n", encoding="utf-8")
    give_up = time.monotonic() + 60 * args.minutes
    left = run_stages(folder, machine, args, give_up)
    if not args.stage or PROGRAMS in args.stage:
        every = gpu_programs.programs(args.device, args.out)
        left += gpu_programs.run(folder, [p for p in every if matches_expression(args.expression, p.name)], give_up)
    tell(folder, left)
    odd = [str(ended["program"]) for ended in gpu_programs.records(folder) if ended["code"]]
    print(*(f"{name}: did not end with 0, see what it printed" for name in odd), sep="\n", end="\n" * bool(odd))
    return code(records(folder), left + len(odd))


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line; None is the process's own."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu", allow_abbrev=False)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case begins after that; default 9")
    parser.add_argument("--stage", choices=[*(s.name for s in STAGES), PROGRAMS], action="append", default=[])
    parser.add_argument(
        "-k", dest="expression", default="", metavar="EXPR", help="of the stages' cases, those selected"
    )
    parser.add_argument("--again", action="store_true", help="cases that have their line as well")
    parser.add_argument("--folder", type=Path, help=f"for results; default {FOLDER}/DATE-GPU-torchVERSION")
    parser.add_argument("--out", type=Path, default=Path("out/gpu"), help="for evidence; default out/gpu")
    parser.add_argument("--backend", choices=("nccl", "gloo"), default="", help="for ranks that share a GPU")
    return parser.parse_args(arguments)


def newest(machine: dict[str, Any]) -> Path | None:
    """Return the folder of the latest results with such a GPU and torch, to go on with. None if there is none."""
    return max(FOLDER.glob(f"*-{gpu_machine.label(machine)}"), default=None)


def run_stages(folder: Path, machine: dict[str, Any], args: argparse.Namespace, give_up: float) -> int:
    """Run the planned cases that have no line yet, appending one for each.

    Return how many are left when the time is over. give_up: when no further case begins, by time.monotonic().
    """
    known = set() if args.again else {(record["stage"], record["case"]) for record in records(folder)}
    todo = [(stage, case) for stage, case in planned(args) if (stage.name, case.name) not in known]
    for number, (stage, case) in enumerate(todo):
        if time.monotonic() > give_up:
            return len(todo) - number
        record = run_one(stage, case, args)
        with open(folder / VERDICTS, "a", encoding="utf-8") as file:
            file.write(json.dumps({**record, "machine": gpu_machine.label(machine)}) + "\n")
        print(f"{number + 1} of {len(todo)}  {line(record)}", flush=True)
    return 0


def planned(args: argparse.Namespace) -> Iterator[tuple[Stage, Case]]:
    """Yield each stage with each of its cases, of those that the options select."""
    cases = load_all()
    for stage in STAGES:
        if not args.stage or stage.name in args.stage:
            yield from ((stage, case) for case in stage.cases(cases) if matches_expression(args.expression, case.name))


def run_one(stage: Stage, case: Case, args: argparse.Namespace) -> dict[str, Any]:
    """Run one case and return its record, whatever becomes of it.

    If its ranks could not share a GPU by NCCL, it runs again by gloo. The record is that of gloo, with NCCL's cause
    beside it.
    """
    options = options_for(stage, case, args)
    record = attempted(stage, case, options)
    lost = options.device == "cuda" and stage.shares and record["checks"].get("completed") == "FAIL"
    if not lost or communication.backend_of(options) == "gloo":
        return record
    again = attempted(stage, case, replace(options, backend="gloo"))
    return {**again, "by nccl": record["cause"]}


def options_for(stage: Stage, case: Case, args: argparse.Namespace) -> Options:
    """Return the options with which a case runs.

    Each stage has a separate folder: stages of different dtypes have cases of one name.
    """
    most = max(launched.dims.world_size for launched in case.launches.values())
    out = args.out / stage.name.replace(" ", "_")
    if args.device == "cpu":
        return Options(out=out)
    shares = most if stage.shares else 1
    return Options(out=out, device="cuda", ranks_per_gpu=shares, backend=args.backend if shares > 1 else "")


def attempted(stage: Stage, case: Case, options: Options) -> dict[str, Any]:
    """Run one case with these options and return its record: the outcome's summary, stage, wall seconds, backend,
    measurements."""
    began = time.monotonic()
    outcome = attempt_case(case, options)
    record = {
        **summarised(outcome),
        "stage": stage.name,
        "wall": round(time.monotonic() - began, 1),
        "backend": communication.backend_of(options),
    }
    return {**record, **measured(folder_of(case, options) / "run")} if outcome.checks else record


def summarised(outcome: Outcome) -> dict[str, Any]:
    """Return the fields of an outcome that are kept; of checks only those that did not pass, by name."""
    return {
        "case": outcome.case,
        "verdict": outcome.verdict,
        "ranks": outcome.ranks,
        "seconds": outcome.seconds,
        "cause": outcome.cause,
        "reason": outcome.reason,
        "checks": {
            check: verdict for check, verdict in outcome.checks.items() if verdict not in ("PASS", "NOT APPLICABLE")
        },
        "replaced": list(outcome.replaced),
    }


def measured(folder: Path) -> dict[str, Any]:
    """Return the median seconds of a step, and the largest peaks in bytes of any rank's allocator, of a stored run.

    The first step is left out. Peaks are missing without an allocator; the result is empty if the run cannot be loaded.
    """
    try:
        ranks = load_run(folder).ranks.values()
    except (EvidenceError, OSError):
        return {}
    steps = [step for evidence in ranks for step in evidence.steps]
    seconds = [step.seconds for step in steps[1:] if step.seconds is not None]
    books = [step.allocator for step in steps if step.allocator]
    peaks = {key: max(book[key] for book in books) for key in ("peak allocated", "peak reserved")} if books else {}
    return {"step": round(median(seconds), 5) if seconds else None, **peaks}


# ---- what is left


def records(folder: Path) -> list[dict[str, Any]]:
    """Return the last record of each case of each stage, from the folder's file; empty without a file."""
    file = folder / VERDICTS
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    found = [json.loads(text) for text in lines]
    return list({(record["stage"], record["case"]): record for record in found}.values())


def tell(folder: Path, left: int) -> None:
    """Write summary.md and cannot_run.txt into the folder; print the table and the folder.

    left: number of cases not run yet.
    """
    found = records(folder)
    (folder / "summary.md").write_text("\n".join(table(found)) + "\n", encoding="utf-8")
    machine = json.loads((folder / "machine.json").read_text(encoding="utf-8"))
    (folder / CANNOT_RUN).write_text("\n".join(cannot_run(found, machine)) + "\n", encoding="utf-8")
    print(*table(found)[2:], sep="\n")
    print(f"{folder}; {left} left, the same command runs them" if left else f"{folder}; all stages are done")


def table(found: Sequence[dict[str, Any]]) -> list[str]:
    """Return the lines of a Markdown table with a row for each stage. found: the records."""
    lines = ["| stage | cases | verdicts | median step | most allocated | by |", "|---|---|---|---|---|---|"]
    for stage in STAGES:
        own = [record for record in found if record["stage"] == stage.name]
        counts = {
            verdict: sum(record["verdict"] == verdict for record in own)
            for verdict in dict.fromkeys(record["verdict"] for record in own)
        }
        steps = [record["step"] for record in own if record.get("step")]
        peak = max((record.get("peak allocated", 0) for record in own), default=0)
        by = ", ".join(sorted({record["backend"] for record in own}))
        shown = ", ".join(f"{count} {verdict}" for verdict, count in counts.items()) or "not run"
        time_text = f"{1000 * median(steps):.1f} ms" if steps else "-"
        lines.append(f"| {stage.name} | {len(own)} | {shown} | {time_text} | {peak / 2**20:.0f} MiB | {by} |")
    return lines


def cannot_run(found: Sequence[dict[str, Any]], machine: dict[str, Any]) -> list[str]:
    """Return lines on missing packages, and on the reasons why cases were skipped or lost, each with its cases."""
    reasons: dict[str, list[str]] = {}
    for record in found:
        if record["verdict"] in SKIPPED_OR_LOST:
            reasons.setdefault(record["reason"], []).append(f"{record['case']} ({record['stage']})")
    lines = [f"without {name}: no {gpu_machine.NEEDED[name]}" for name in machine["missing"]]
    for reason, cases in sorted(reasons.items()):
        lines += ["", reason, *(f"    {case}" for case in cases)]
    return lines or ["nothing: all ran"]


def line(record: dict[str, Any]) -> str:
    """Return a line on one record: verdict, stage, case, seconds and reason."""
    why = record["cause"] or record["reason"]
    return f"{record['verdict']:<8} {record['stage']}: {record['case']}  {record['wall']} s  {why}".rstrip()


def code(found: Sequence[dict[str, Any]], left: int) -> int:
    """Return the exit code: BROKEN if any record is FAIL; PASSED if some are green, the rest skipped and none left;
    else NOT_JUDGED."""
    verdicts = {record["verdict"] for record in found}
    if "FAIL" in verdicts:
        return BROKEN
    green = any(verdict in GREEN_VERDICTS for verdict in verdicts)
    return PASSED if green and not left and verdicts <= {*GREEN_VERDICTS, "SKIPPED"} else NOT_JUDGED


if __name__ == "__main__":
    sys.exit(main())
