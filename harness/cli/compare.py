"""`harness compare A B`: what differs between two runs of a matrix, or in the structure of two recorded jobs."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from harness.cli.answer import answer
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED, SKIP_COMMIT
from harness.cli.options import BadInput, add_command
from harness.cli.record import add_recording, record
from harness.cli.report import last_runs
from harness.cli.snapshot import answer_structures, load_snapshot
from harness.evidence.store import CASE_FILE, load_run
from harness.judge.run_as_recording import as_recording
from harness.judge.stored_recording import Recording, load_recording
from harness.judge.structure import compared_outside, costs, differences, structure
from harness.report.compared_runs import compared_runs
from harness.report.output import complain
from harness.run import verdicts
from harness.run.comparison import compared_cases, of_runs

OF = ("name", "one", "other")


def add(commands: Any) -> None:
    parser = add_command(commands, "compare", command, "say what differs between two runs, or two recorded jobs")
    parser.add_argument(
        "folders",
        metavar="A B",
        nargs="*",
        help="folders of `harness matrix` or `harness run`, recordings, or a snapshot of one",
    )
    parser.add_argument(
        "--with",
        dest="good",
        type=Path,
        metavar="A",
        help="record -- COMMAND and compare it with this; for git bisect run",
    )
    parser.add_argument(
        "-o", "--out", type=Path, default=Path("out/compared"), metavar="DIR", help="for that recording"
    )
    add_recording(parser, words="*")  # options may stand behind A and B


def command(args: argparse.Namespace) -> int:
    """1 where verdicts or structure differ; with a command 125, which bisecting skips, where it could not be recorded."""
    if args.good is None:
        if len(args.folders) != 2 or args.words:
            raise BadInput("compare: two runs, two recordings, or --with A -- COMMAND")
        return _between(args, *map(Path, args.folders))
    args.words = [*args.folders, *args.words]  # behind -- all words look alike
    try:
        code = record(args, args.out)
    except BadInput as error:
        args.failed = str(error)
        complain(args.failed)
        return SKIP_COMMIT
    recording = load_recording(args.out)
    if code or len(recording.summaries) < max(recording.world, 1):
        args.failed = (
            f"the command ended with code {code}, {len(recording.summaries)} ranks left evidence: not compared"
        )
        complain(args.failed)
        return SKIP_COMMIT
    return _said(args, args.good, args.out)


def _between(args: argparse.Namespace, one: Path, other: Path) -> int:
    runs = [folder for folder in (one, other) if verdicts.file_in(folder)]
    if not runs:
        return _said(args, one, other)
    if len(runs) == 1:
        raise BadInput(f"compare: {runs[0]} is a run of a matrix, and the other is not")
    return _runs(args, one, other)


def _runs(args: argparse.Namespace, one: Path, other: Path) -> int:
    """2 where nothing was compared, or something of a case was not."""
    a, b = last_runs([one, other])
    cases = compared_cases(a, b)
    on_gpus = all(run.begins.get("device") == "cuda" for run in (a, b))
    of = of_runs(a, b)
    data = {"one": one, "other": other, "of": "runs", "runs": [dict(zip(OF, each, strict=True)) for each in of]}
    text = "\n".join(compared_runs(str(one), str(other), of, cases, on_gpus=on_gpus))
    answer(args, "comparison", data | {"cases": cases}, text)
    if any(each.found for each in cases):
        return BROKEN
    return NOT_JUDGED if not cases or any(each.problem for each in cases) else PASSED


def _said(args: argparse.Namespace, one: Path, other: Path) -> int:
    (a, a_costs), (b, b_costs) = _read(one), _read(other)
    found = differences(a, b)
    answer_structures(args, (one, other), found, (a_costs, b_costs), compared_outside(a, b))
    if not (a and b):
        complain("nothing to compare")
        return NOT_JUDGED
    return BROKEN if found else PASSED


def _read(path: Path) -> tuple[Mapping[str, Any], Mapping[str, float]]:
    """Raises EvidenceError."""
    if path.suffix in (".yaml", ".yml"):
        return load_snapshot(path), {}
    of_a_case = (path / CASE_FILE).exists()
    recording: Recording = as_recording(load_run(path / "run")) if of_a_case else load_recording(path)
    return (structure(recording), costs(recording)) if recording.summaries else ({}, {})
