"""What can be typed behind `harness check`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.parsing import add_json


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness check`: --json and the folders."""
    add_json(parser)
    parser.add_argument(
        "folders", metavar="DIR", nargs="+", type=Path, help="what `harness run` wrote, or a folder of such"
    )
