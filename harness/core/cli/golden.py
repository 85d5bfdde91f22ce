"""What can be typed behind `harness golden`. Rings add more: --plot is in harness/faults/cli/options.py."""

from __future__ import annotations

import argparse

from harness.core.cli.parsing import add_cases, add_json, add_out, add_selection


def add(parser: argparse.ArgumentParser) -> None:
    """Add the options of `harness golden`."""
    add_json(parser)
    add_cases(parser)
    add_selection(parser)
    parser.add_argument("--accept", action="store_true", help="rewrite the goldens; judges nothing, refused in CI")
    add_out(parser, help="where references and pictures go; default out")
