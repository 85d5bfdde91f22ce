"""`harness matrix`: all cases, or those selected, side by side."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from harness import trainers
from harness.cli.exit_codes import NOT_JUDGED, PASSED, exit_code, worst
from harness.cli.interrupt import abandon
from harness.cli.options import (
    BadInput,
    add_cases,
    add_command,
    add_how_to_run,
    add_jobs,
    add_recipe,
    add_selection,
    cases_of,
    jobs_of,
    options_of,
    positive_int,
)
from harness.report.grid import Outcome, matrix_report
from harness.report.output import say
from harness.report.progress import Progress
from harness.run.matrix import run_all
from harness.run.selection import ALL_TIERS, matching, of_tier, weight
from harness.run.supported import unsupported
from harness.spec import case_files, coverage, random_cases
from harness.spec.case import TIERS, Case
from harness.spec.variants import in_dtype, reseeded


def add(commands: Any) -> None:
    parser = add_command(commands, "matrix", command, "run and judge all cases, or those that -k selects")
    add_cases(parser)
    add_selection(parser)
    tiers = (*TIERS, ALL_TIERS)
    parser.add_argument(
        "--tier", choices=tiers, default="default", help="which cases; all but default are for the night"
    )
    add_jobs(parser, "cases at a time")
    add_recipe(parser)
    parser.add_argument(
        "--random",
        type=positive_int,
        metavar="N",
        help="instead, N cases of options drawn at random; --seed draws others",
    )
    parser.add_argument("--list", action="store_true", help="only list the cases")
    parser.add_argument(
        "--all", action="store_true", help="only list every pair of options, with its case or its reason"
    )
    add_how_to_run(parser)


def command(args: argparse.Namespace) -> int:
    if args.all:
        return pairs_code(coverage.pairs(cases_of(args), trainers.load(args.trainer).unsupported))
    cases, more = selected(args)
    if args.list:
        say(listing(cases))
        return PASSED
    progress = Progress({case.name: weight(case) for case in cases}, sys.stderr)
    try:
        outcomes = run_all(cases, options_of(args), jobs=jobs_of(args), progress=progress)
    except KeyboardInterrupt:
        abandon(progress, "cases")
    say(matrix_report(outcomes, progress.elapsed()))
    if more:
        say(f"{more} more of other tiers were not run: --tier all")
    return matrix_code(outcomes)


def selected(args: argparse.Namespace) -> tuple[list[Case], int]:
    """And how many more there are in other tiers."""
    if args.random:
        if args.expression:
            raise BadInput("--random: leave out -k, which is for cases of files")
        options, seed = options_of(args), 1 if args.seed is None else args.seed
        return random_cases.first(args.random, seed, lambda case: unsupported(case, options), dtype=args.dtype), 0
    chosen = matching(cases_of(args), args.expression)
    cases = of_tier(chosen, args.tier)
    cases = [in_dtype(case if args.seed is None else reseeded(case, args.seed), args.dtype) for case in cases]
    return cases, len(chosen) - len(cases)


def matrix_code(outcomes: Sequence[Outcome]) -> int:
    """Cases that were skipped count for nothing; if no other is left, nothing was judged."""
    ran = [outcome for outcome in outcomes if not outcome.skipped]
    return worst(exit_code(outcome.judgement) if outcome.judgement else NOT_JUDGED for outcome in ran)


def pairs_code(found: Sequence[coverage.Pair]) -> int:
    """Every pair of options with its case or its reason; a pair with neither is a gap in the matrix."""
    say(coverage.pairs_text(found))
    return NOT_JUDGED if any(pair.missing for pair in found) else PASSED


def listing(cases: Sequence[Case]) -> str:
    width = max(len(case.name) for case in cases)
    lines = []
    for file in dict.fromkeys(case.file for case in cases):
        lines += [case_files.shown(file)] if file else []
        lines += [
            f"  {case.name:<{width}}  {case.dims.world_size:>2} ranks  {case.why}"
            for case in cases
            if case.file == file
        ]
    return "\n".join(lines)
