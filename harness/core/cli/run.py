"""What can be typed behind `harness run`. Rings add more: --fault is in harness/faults/cli/options.py."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.completion import case_names
from harness.core.cli.parsing import add_again, add_cases, add_how_to_run, add_json, add_recipe

FIRST_NODE_PATIENCE = 600.0  # seconds in which the first node begins the launch; it may run the reference before
SERVER_ACTIONS = (SHOW, END, END_ALL) = ("show", "end", "end-all")
"""What can be done with the rank servers that stay."""


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness run`, with those on rank servers and other nodes."""
    add_json(parser)
    case = parser.add_argument("case", metavar="CASE", nargs="?", help="its name; `harness matrix --list` lists them")
    case.completer = case_names  # type: ignore[attr-defined]
    add_cases(parser)
    parser.add_argument(
        "--bisect", action="store_true", help="exit 125 where nothing could be judged, for `git bisect run`"
    )
    add_recipe(parser)
    add_again(parser, default=0)
    server_help = "; without CASE: show those that stay, end them, or end-all of other environments"
    group = add_how_to_run(parser, SERVER_ACTIONS, server_help)
    group.add_argument(
        "--join",
        type=Path,
        metavar="DIR",
        help=f"without CASE, on every other node: its part of the launch in OUT/CASE; waits {FIRST_NODE_PATIENCE:g} s for it, "
        "or --timeout",
    )
