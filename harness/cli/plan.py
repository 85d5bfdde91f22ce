"""`harness plan CASE`: what must be true of a case's layout, and what it costs."""

from __future__ import annotations

import argparse
from typing import Any

from harness.cli.answer import answer
from harness.cli.exit_codes import PASSED
from harness.cli.layout_options import add_layout, layout_case
from harness.cli.options import add_command
from harness.plan.figures.rank_bytes import GPUS
from harness.plan.make_plan import make_plan
from harness.report import layout_documents
from harness.report.plan_text import plan_text


def add(commands: Any) -> None:
    parser = add_command(commands, "plan", command, "show what a case's layout must look like, and what it costs")
    add_layout(parser)
    parser.add_argument("--gpu", default="H100", choices=GPUS, help="whose memory is compared; default H100 of 80 GB")


def command(args: argparse.Namespace) -> int:
    asked = layout_case(args)
    case, plan = asked.case, make_plan(asked.case, asked.traits)
    text = plan_text(case, plan, args.gpu, set_aside=asked.set_aside)
    answer(args, "plan", lambda: layout_documents.plan(case, plan, args.gpu, asked.set_aside), text)
    return PASSED
