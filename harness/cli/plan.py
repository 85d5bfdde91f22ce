"""`harness plan CASE`: what must be true of a case's layout."""

from __future__ import annotations

import argparse
from typing import Any

from harness.cli.exit_codes import PASSED
from harness.cli.options import add_cases, add_command, case_of
from harness.plan.make_plan import make_plan
from harness.report.output import say
from harness.report.plan_text import plan_text


def add(commands: Any) -> None:
    parser = add_command(commands, "plan", command, "show what a case's layout must look like")
    parser.add_argument("case", metavar="CASE", help="its name; `harness matrix --list` lists them")
    add_cases(parser)


def command(args: argparse.Namespace) -> int:
    case = case_of(args)
    say(plan_text(case, make_plan(case)))
    return PASSED
