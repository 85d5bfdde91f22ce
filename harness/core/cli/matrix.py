"""What can be typed behind `harness matrix`. Rings add more: --changed, --map, --on are in nights/cli/changed_options.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.case.case import TIERS
from harness.core.cli.parsing import (
    add_again,
    add_cases,
    add_how_to_run,
    add_jobs,
    add_json,
    add_recipe,
    add_selection,
    positive_int,
)
from harness.core.run.selection import ALL_TIERS


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness matrix`."""
    add_json(parser)
    add_cases(parser)
    add_selection(parser)
    add_tier(parser)
    add_jobs(parser, "cases at a time at most; default as many as slots allow")
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
    add_parts(parser)
    add_again(parser, default=1)
    add_how_to_run(parser)


def add_tier(parser: argparse.ArgumentParser) -> None:
    """Add --tier, which tier of cases runs; by default "default"."""
    parser.add_argument(
        "--tier", choices=(*TIERS, ALL_TIERS), default="default", help="which cases; all but default are for the night"
    )


def add_parts(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose a part of the selected cases, and continue or repeat an earlier run."""
    part = parser.add_argument_group("which part of them; every run is recorded in OUT/verdicts.jsonl")
    part.add_argument("--shard", metavar="I/N", help="the I-th of N parts, which several machines run")
    part.add_argument(
        "--durations",
        type=Path,
        metavar="FILE",
        action="append",
        help="parts of equal length, by a verdicts.jsonl that all machines have; else by ranks",
    )
    part.add_argument(
        "--resume", action="store_true", help="go on with the last run in OUT, which was cut short: with its cases"
    )
    part.add_argument("--last-failed", action="store_true", help="those not green in the last run in OUT")
    part.add_argument("--max-failures", type=positive_int, metavar="N", help="begin no other case after N failures")
