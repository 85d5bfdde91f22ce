"""What can be typed behind `harness doctor`."""

from __future__ import annotations

import argparse

from harness.core.cli.parsing import add_cases, add_how_to_run, add_json, add_selection
from harness.reference.config import DTYPES


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_cases(parser)
    add_selection(parser)
    parser.add_argument("--dtype", choices=DTYPES, metavar="DTYPE", help="for a trainer that computes in no other")
    add_how_to_run(parser)
