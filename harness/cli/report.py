"""`harness report`: stored evidence as a picture."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from harness.cli.exit_codes import PASSED
from harness.cli.options import add_command, needs_matplotlib
from harness.report.output import say
from harness.run.folders import case_folders
from harness.run.judging import judge_folder


def add(commands: Any) -> None:
    parser = add_command(
        commands, "report", command, "draw stored evidence: who holds what, which groups moved what, losses"
    )
    parser.add_argument("folders", metavar="DIR", nargs="+", type=Path, help="as for check")


def command(args: argparse.Namespace) -> int:
    """A picture beside each folder's evidence. Needs all ranks' evidence: a rank that left none has nothing to show."""
    needs_matplotlib()
    from harness.report.pictures import draw_judged  # matplotlib takes half a second

    for folder in case_folders(args.folders):
        say(draw_judged(judge_folder(folder)))
    return PASSED
