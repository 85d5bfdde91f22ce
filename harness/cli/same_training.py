"""Options and answer of what judges a recording by another one of the same training, in another layout."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from harness.cli.answer import answer
from harness.cli.exit_codes import BROKEN, NOT_JUDGED, PASSED
from harness.cli.options import BadInput
from harness.judge.result import Verdict
from harness.judge.stored_recording import load_recording, started
from harness.plan.grid import coordinate
from harness.record import injection
from harness.report.same_training import as_document, same_training, verdict_of
from harness.run.same_training import files_of, judged_by
from harness.spec import layout
from harness.spec.dims import AXES, ParallelDims

DTYPES = ("compute", "float64", "float32", "bfloat16", "float16")
OF_A = "_noise"
"""What the folder of the noise is called, behind the name of the recording whose noise it is."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add what `record` takes."""
    parser.add_argument(
        "--same-as", type=Path, metavar="A", help="judge gradients and updates by A, a recording of the same training"
    )
    add_noise_of(parser)
    parser.add_argument(
        "--noise",
        nargs="?",
        const="compute",
        choices=DTYPES,
        metavar="DTYPE",
        help="alter the first weights by one rounding of DTYPE; default that of the forward pass",
    )
    parser.add_argument(
        "--sharded",
        action="append",
        default=[],
        metavar="PATTERN=AXIS:DIM",
        help="plain tensors of which each rank along AXIS of --layout holds a part of DIM",
    )

    parser.add_argument(
        "--rows",
        type=int,
        default=0,
        metavar="N",
        help="sketch N blocks of rows of each gradient, in both recordings, so that wrong rows are found",
    )


def add_comparison(parser: argparse.ArgumentParser) -> None:
    """Add what `compare` takes."""
    parser.add_argument("--numbers", action="store_true", help="compare gradients and updates, not the structure")
    add_noise_of(parser)


def add_noise_of(parser: argparse.ArgumentParser) -> None:
    """Add where noise is recorded, and what was resumed."""
    parser.add_argument(
        "--after",
        type=int,
        default=0,
        metavar="STEP",
        help="the job went on from the checkpoint that A's job saved after this step",
    )
    parser.add_argument(
        "--noise-of", type=Path, metavar="N", help=f"the recording of A's noise; default A{OF_A} where it is there"
    )


def environment(args: argparse.Namespace) -> dict[str, str]:
    """Return the variables for the recorder in the ranks. Raises BadInput and CaseError."""
    found = {injection.NOISE: args.noise} if args.noise else {}
    if args.same_as is not None:
        load_recording(args.same_as)  # before the command trains to its end
        files_of(args.same_as)
    if args.after < 0:
        raise BadInput(f"--after {args.after}: a step of A, from whose checkpoint the job went on")
    if args.after and args.same_as is None:
        raise BadInput("--after: name the recording of the job that was not interrupted by --same-as")
    if args.rows < 0:
        raise BadInput(f"--rows {args.rows}: a number of blocks, such as 16")
    if args.rows:
        found[injection.ROWS] = str(args.rows)
    if args.sharded:
        found[injection.SHARDED] = json.dumps(_declared(args))
    return found


def _declared(args: argparse.Namespace) -> list[tuple[str, int, list[int], str]]:
    """Return pattern, dim, by rank which part it holds, and the axis."""
    ranks = injection.requested_ranks(args.words)
    if args.layout is None or ranks is None:
        raise BadInput("--sharded: give the axis's ranks by --layout, and a command that says how many ranks it starts")
    dims = layout.layout(args.layout, ranks)
    return [one_declared(text, dims) for text in args.sharded]


def one_declared(text: str, dims: ParallelDims) -> tuple[str, int, list[int], str]:
    pattern, _, place = text.rpartition("=")
    axis, _, dim = place.partition(":")
    if not pattern or axis not in AXES or not dim.isdecimal():
        raise BadInput(f"--sharded: {text!r}: write PATTERN=AXIS:DIM, such as '*.w1.weight=tp:0'")
    return pattern, int(dim), [coordinate(dims, rank)[axis] for rank in range(dims.world_size)], axis


def command(args: argparse.Namespace, out: Path, _: object = None) -> int:
    """Answer for what was just recorded."""
    return answer_same_training(args, args.same_as, out)


def is_judged_by(args: argparse.Namespace, other: Path) -> bool:
    """Return whether numbers are compared, not structure: if requested now, or when the second was recorded."""
    return bool(args.numbers or args.noise_of or args.after or started(other).get("same_as"))


def answer_same_training(args: argparse.Namespace, one: Path, other: Path) -> int:
    """Say whether the second recording is the same training as the first. Raises EvidenceError."""
    noise = args.noise_of
    if noise is None and os.path.isdir(beside := f"{one}{OF_A}"):
        noise = Path(beside)
    found = judged_by(one, other, noise, args.after or started(other).get("after", 0))
    answer(args, "same_training", lambda: as_document(found), same_training(found))
    return {Verdict.PASS: PASSED, Verdict.FAIL: BROKEN}.get(verdict_of(found), NOT_JUDGED)
