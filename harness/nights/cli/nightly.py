"""The arguments of `harness nightly`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.matrix import add_tier
from harness.core.cli.parsing import (
    add_again,
    add_cases,
    add_how_to_run,
    add_jobs,
    add_json,
    add_recipe,
    add_selection,
)
from harness.nights.cli.changed_options import add_map


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    parser.add_argument(
        "nights", metavar="NIGHTS", type=Path, help="a folder of verdicts, to which this night is added"
    )
    parser.add_argument(
        "--of",
        type=Path,
        nargs="+",
        default=[],
        metavar="DIR",
        help="what other machines ran, the shards of this night: nothing is run",
    )
    parser.add_argument("--repo", type=Path, metavar="PATH", help="a clone of the trainer; only read")
    parser.add_argument("--commit", metavar="COMMIT", help="of PATH, to run instead of what is checked out there")
    parser.add_argument(
        "--minutes",
        type=float,
        default=60.0,
        metavar="N",
        help="for finding commits, in all; default 60, 0: none is looked for",
    )
    parser.add_argument("--quarantine", type=Path, metavar="FILE", help="cases set aside until a day; YAML, only read")
    add_cases(parser)
    add_selection(parser)
    add_tier(parser)
    add_jobs(parser, "cases at a time at most; default as many as slots allow")
    add_recipe(parser)
    add_again(parser, default=1)
    add_map(parser)
    add_how_to_run(parser)
