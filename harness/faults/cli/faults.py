"""What can be typed behind `harness faults`."""

from __future__ import annotations

import argparse
from pathlib import Path

from harness.core.cli.parsing import add_cases, add_how_to_run, add_jobs, add_json


def add(parser: argparse.ArgumentParser) -> None:
    add_json(parser)
    add_cases(parser)
    parser.add_argument(
        "-k", dest="expression", default="", metavar="EXPR", help="words of name, case, bug, kind of bug and checks"
    )
    add_jobs(parser, "at a time at most; default as many as there are cores, on GPUs as slots allow")
    parser.add_argument(
        "--file", type=Path, metavar="FILE.py", help="a catalogue of your own in place of harness/faults"
    )
    parser.add_argument(
        "--list", action="store_true", help="only list the faults, and what each was named when last accepted"
    )
    parser.add_argument(
        "--checks-only", action="store_true", help="do not measure weaker tests, which takes half of the time"
    )
    add_how_to_run(parser)
