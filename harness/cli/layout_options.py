"""A layout as a person names or types it: a case, a published layout of layouts/, or degrees, a model and lengths."""

from __future__ import annotations

import argparse
from typing import Any

from harness.cli.options import BadInput, add_cases, case_of, positive_int
from harness.preflight.request import Request
from harness.spec import case_files
from harness.spec.case import Case
from harness.spec.loading import load_all
from harness.spec.validation import validate

KEYS = ("dims", "model", "seq", "batch", "microbatches", "schedule", "checkpointing")


def add_layout(parser: argparse.ArgumentParser, *, or_command: bool = False) -> None:
    """or_command: the words of a command may stand for CASE, behind "--"; `case` is then a list."""
    more = {"metavar": "CASE | -- COMMAND", "nargs": "*"} if or_command else {"metavar": "CASE", "nargs": "?"}
    parser.add_argument("case", help="a case or published layout by its name; or --dims", **more)  # type: ignore[arg-type]
    add_cases(parser)
    what = parser.add_argument_group("a layout that is in no file")
    what.add_argument("--dims", metavar="DEGREES", help="pp=16,dp_shard=128,tp=8, or torchtitan's FILE.toml")
    what.add_argument("--model", default="debug", metavar="NAME", help="a published size: 8B, 70B, 405B; default debug")
    what.add_argument("--seq", type=positive_int, default=8192, metavar="N", help="tokens of a sample; default 8192")
    what.add_argument("--batch", type=positive_int, metavar="N", help="samples of a step; default the fewest")
    what.add_argument("--microbatches", type=positive_int, metavar="N", help="of a pipeline; default two a stage")
    what.add_argument("--schedule", default="1F1B", metavar="NAME", help="of a pipeline; default 1F1B")
    what.add_argument("--checkpointing", default="none", metavar="KIND", help="of activations: full, layer, op")


def layout_case(args: argparse.Namespace, **more: Any) -> Case:
    """more: of the request, what one command alone can be told. Raises BadInput and CaseError."""
    if bool(args.case) == bool(args.dims):
        raise BadInput("name a CASE, or give a layout by --dims")
    if args.case:
        return _published(args) or case_of(args)
    case = Request(**{key: getattr(args, key) for key in KEYS}, **more).case()
    validate(case, None, "--dims")
    return case


def _published(args: argparse.Namespace) -> Case | None:
    """Layouts have no folder of their own on the command line: their names are known beside those of cases."""
    known = () if args.cases else load_all(case_files.LAYOUTS)
    return next((case for case in known if case.name == args.case), None)
