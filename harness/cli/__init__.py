"""The command line. A command is one file here: `add` says what can be typed, `command` does it, answering an exit code."""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence

from harness.bisect import BisectError
from harness.cli.exit_codes import INTERRUPTED, NOT_JUDGED, PASSED, SAID, SKIP_COMMIT
from harness.cli.interrupt import one_interrupt
from harness.cli.options import BadInput, Parser
from harness.cli.version import Version
from harness.evidence.store import EvidenceError
from harness.faults import FaultError
from harness.judge.golden import GoldenError
from harness.launch import LaunchError
from harness.report.output import OutputError, any_letters, complain
from harness.run.options import Unsupported
from harness.spec.case import CaseError

COMMANDS = (
    *("init", "doctor", "run", "matrix", "check", "report", "history", "nightly", "record"),
    *("show", "compare", "snapshot", "plan", "preflight", "golden", "faults", "bisect", "join", "server"),
)
EXPECTED = (BadInput, BisectError, CaseError, EvidenceError, FaultError, GoldenError, LaunchError, OutputError)


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    any_letters()
    try:
        args = parser(argv[0] if argv else "").parse_args(argv)
    except SystemExit as stop:  # it has said what was wrong
        code = NOT_JUDGED if stop.code else PASSED
    else:
        with one_interrupt():
            code = guarded(args)
    return SKIP_COMMIT if code == NOT_JUDGED and "--bisect" in argv else code


def guarded(args: argparse.Namespace) -> int:
    """The command's exit code. What keeps it from judging is a message and never a verdict."""
    try:
        return args.command(args)
    except EXPECTED as error:
        complain(str(error))
    except Unsupported as reason:
        complain(f"skipped, nothing was judged: {reason}")
    except KeyboardInterrupt as stop:
        complain("\n  ".join(["interrupted; nothing was judged, the ranks are killed", *map(str, stop.args)]))
        return INTERRUPTED
    except (Exception, SystemExit):  # a mistake of ours, or an exit of a trainer's, must look like no verdict
        traceback.print_exc()
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
