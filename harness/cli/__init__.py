"""The command line. A command has a file of its name: `add` says what can be typed, `command` does it.

It returns an exit code.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from harness.bisect import BisectError
from harness.cli.answer import asked, only_the_document, print_document
from harness.cli.completion import complete
from harness.cli.exit_codes import INTERRUPTED, NOT_JUDGED, PASSED, SAID, SKIP_COMMIT
from harness.cli.interrupt import one_interrupt
from harness.cli.options import BadInput, Parser, Usage
from harness.cli.version import Version
from harness.evidence.errors import CheckError
from harness.evidence.store import EvidenceError
from harness.faults import FaultError
from harness.judge.golden import GoldenError
from harness.launch import LaunchError
from harness.report.output import OutputError, any_letters, complain
from harness.run.options import Unsupported
from harness.spec.case import CaseError

COMMANDS = (
    *("init", "doctor", "run", "matrix", "check", "report", "record"),
    *("compare", "plan", "preflight", "golden", "faults", "bisect", "nightly"),
)
RENAMED = {
    "show": "harness report RECORDING",
    "history": "harness report --history DIR",
    "snapshot": "harness compare FILE.yaml RECORDING --accept",
    "join": "harness run --join DIR",
    "server": "harness run --server show|end|end-all",
}
"""Commands of the release before, for one release, and what is typed instead."""
EXPECTED = (
    BadInput,
    BisectError,
    CaseError,
    CheckError,
    EvidenceError,
    FaultError,
    GoldenError,
    LaunchError,
    OutputError,
)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    any_letters()
    complete(parser)
    try:
        refuse_renamed(argv)
        args = parser(argv[0] if argv else "").parse_args(argv)
    except SystemExit as stop:  # it has said what was wrong
        code = NOT_JUDGED if stop.code else PASSED
        args = argparse.Namespace(json=bool(stop.code) and asked(argv), failed=getattr(stop, "message", ""))
    else:
        with one_interrupt(), only_the_document() if args.json else nullcontext():
            code = guarded(args)
    code = SKIP_COMMIT if code == NOT_JUDGED and "--bisect" in argv else code
    try:
        if args.json:
            print_document(args, code)
    except OutputError as error:
        complain(str(error))
        return NOT_JUDGED
    return code


def refuse_renamed(argv: Sequence[str]) -> None:
    """Raises Usage for a command that has another name now."""
    if argv and (now := RENAMED.get(argv[0])):
        message = f"`harness {argv[0]}` has another name now: {now}"
        complain(message)
        raise Usage(message)


def guarded(args: argparse.Namespace) -> int:
    """The command's exit code. What keeps it from judging is a message and never a verdict."""
    try:
        return args.command(args)
    except EXPECTED as error:
        args.failed = str(error)
    except Unsupported as reason:
        args.failed = f"skipped, nothing was judged: {reason}"
    except KeyboardInterrupt as stop:
        args.failed = "\n  ".join(["interrupted; nothing was judged, the ranks are killed", *map(str, stop.args)])
        complain(args.failed)
        return INTERRUPTED
    except (Exception, SystemExit) as error:  # a mistake of ours, or a trainer's exit, must look like no verdict
        args.failed = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        return NOT_JUDGED
    complain(args.failed)
    return NOT_JUDGED


def parser(typed: str = "") -> argparse.ArgumentParser:
    """Of the command that is typed; of all where it is none of them. Importing them all takes as long as judging a case."""
    top = Parser(
        prog="harness",
        description="Proves that a distributed trainer does what its configuration says.",
        epilog=SAID,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=Version, nargs=0, help="of the harness, its records, torch and Python")
    commands = top.add_subparsers(metavar="COMMAND", title="commands", required=True)
    for name in [typed] if typed in COMMANDS else COMMANDS:
        importlib.import_module(f"harness.cli.{name}").add(commands)
    return top
