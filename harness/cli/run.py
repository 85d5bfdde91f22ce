"""`harness run CASE`: one case, judged."""

from __future__ import annotations

import argparse
import shlex
import sys
from typing import Any

from harness.cli.answer import answer
from harness.cli.exit_codes import exit_code
from harness.cli.options import (
    BadInput,
    add_cases,
    add_command,
    add_how_to_run,
    add_recipe,
    case_of,
    options_of,
    which_trainer,
)
from harness.record.injection import requested_ranks
from harness.report.documents import case_here
from harness.report.output import say
from harness.report.text import case_report
from harness.run.folders import folder_of
from harness.run.run_case import run_case
from harness.spec.variants import in_dtype, reseeded


def add(commands: Any) -> None:
    parser = add_command(commands, "run", command, "run one case and judge it")
    parser.add_argument("case", metavar="CASE", help="its name; `harness matrix --list` lists them")
    add_cases(parser)
    parser.add_argument(
        "--fault", metavar="FILE.py:NAME", help="a deliberate mistake to make, or a NAME of the catalogue"
    )
    parser.add_argument(
        "--bisect", action="store_true", help="exit 125 where nothing could be judged, for `git bisect run`"
    )
    add_recipe(parser)
    add_how_to_run(parser)


def command(args: argparse.Namespace) -> int:
    case, options = case_of(args), options_of(args)
    case = in_dtype(case if args.seed is None else reseeded(case, args.seed), args.dtype)
    ranks, degrees = requested_ranks(["torchrun", *options.torchrun_args]), case.dims
    if ranks not in (None, degrees.world_size):
        raise BadInput(
            f"--torchrun-args: they start {ranks} ranks, but {case.name} is {degrees} = {degrees.world_size} ranks"
        )
    if options.torchrun_args:
        say(f"on every other node: harness join {shlex.quote(str(folder_of(case, options)))}", to=sys.stderr)
    judgement = run_case(case, options)
    answer(args, "case", case_here(judgement), case_report(judgement), *which_trainer(args))
    return exit_code(judgement)
