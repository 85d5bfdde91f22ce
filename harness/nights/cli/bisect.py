"""The arguments of `harness bisect`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.parsing import add_cases, add_how_to_run, add_json, add_selection


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_cases(parser)
    parser.add_argument("--repo", type=Path, metavar="PATH", help="a clone of the trainer; only read")
    parser.add_argument("--good", metavar="COMMIT", help="where this is the later one, what fixed it is looked for")
    parser.add_argument("--bad", metavar="COMMIT")
    parser.add_argument(
        "--over",
        metavar="PACKAGE==GOOD,..,BAD",
        help="versions instead, each made with pip, or VERSION@PYTHON that has it",
    )
    add_selection(parser)
    parser.add_argument(
        "--fault",
        metavar="FILE.py:NAME",
        help="made in every run, as of an option of the trainer that no case requests",
    )
    add_how_to_run(parser)
