"""The command line. Each command has two files of its name: one says what can be typed, and the one in work/ does it.

What can be typed is known without importing what does it. Help, completion and a mistyped command need no more.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext

from harness.core import rings
from harness.core.cli.answer import is_document_asked, print_document, stdout_for_document_only
from harness.core.cli.completion import answer_completion
from harness.core.cli.exit_codes import EXIT_CODES_HELP, INTERRUPTED, NOT_JUDGED, PASSED, SKIP_COMMIT
from harness.core.cli.interrupt import single_interrupt
from harness.core.cli.parsing import CommandParser, Parser, UsageError
from harness.core.cli.version import Version
from harness.core.report.output import OutputError, escape_unprintable_letters, print_error
from harness.core.run.options import Unsupported

CORE_COMMANDS = {
    "run": "run one case and judge it",
    "matrix": "run and judge all cases, or those that -k selects",
    "check": "judge stored evidence; starts nothing",
    "golden": "compare the reference with its accepted curves, or accept it",
}
"""Each command of the core, and its line of help."""


def all_commands() -> dict[str, tuple[str, str]]:
    """Return the commands of the core and of rings by name: the package that has each, and its line of help."""
    return {name: (__name__, help) for name, help in CORE_COMMANDS.items()} | rings.commands_of_rings()


RENAMED_COMMANDS = {
    "show": "harness report RECORDING",
    "history": "harness report --history DIR",
    "snapshot": "harness compare FILE.yaml RECORDING --accept",
    "join": "harness run --join DIR",
    "server": "harness run --server show|end|end-all",
}
"""Commands of the release before, for one release, and what is typed instead."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that was typed and return the exit code; with --json print one document, also on why nothing was
    judged.

    argv: the words behind `harness`; None for those of this process. A shell that asks for completion is answered
    instead.
    """
    argv = sys.argv[1:] if argv is None else argv
    escape_unprintable_letters()
    answer_completion(make_parser)
    try:
        refuse_renamed(argv)
        args = make_parser().parse_args(argv)
    except SystemExit as stop:  # it has said what was wrong
        code = NOT_JUDGED if stop.code else PASSED
        args = argparse.Namespace(json=bool(stop.code) and is_document_asked(argv), failed=getattr(stop, "message", ""))
    else:
        with single_interrupt(), stdout_for_document_only() if args.json else nullcontext():
            code = run_command(args)
    code = SKIP_COMMIT if code == NOT_JUDGED and "--bisect" in argv else code
    try:
        if args.json:
            print_document(args, code)
    except OutputError as error:
        print_error(str(error))
        return NOT_JUDGED
    return code


def refuse_renamed(argv: Sequence[str]) -> None:
    """Print an error and raise UsageError for a command that has another name now."""
    if argv and (replacement := RENAMED_COMMANDS.get(argv[0])):
        message = f"`harness {argv[0]}` has another name now: {replacement}"
        print_error(message)
        raise UsageError(message)


def run_command(args: argparse.Namespace) -> int:
    """Run the command and return its exit code. What keeps it from judging is printed, kept in `args.failed`, and never
    a verdict.

    The code is then NOT_JUDGED, or INTERRUPTED after Ctrl-C.
    """
    expected: tuple[type[Exception], ...] = ()
    try:
        expected = importlib.import_module("harness.core.cli.work.expected").EXPECTED
        return importlib.import_module(f"{args.package}.work.{args.command}").command(args)
    except expected as error:
        args.failed = str(error)
    except Unsupported as reason:
        args.failed = f"skipped, nothing was judged: {reason}"
    except KeyboardInterrupt as stop:
        args.failed = "\n  ".join(["interrupted; nothing was judged, the ranks are killed", *map(str, stop.args)])
        print_error(args.failed)
        return INTERRUPTED
    except (Exception, SystemExit) as error:  # a mistake of ours, or a trainer's exit, must look like no verdict
        args.failed = f"{type(error).__name__}: {error}"
        traceback.print_exc()
        return NOT_JUDGED
    print_error(args.failed)
    return NOT_JUDGED


def make_parser(typed: str = "") -> argparse.ArgumentParser:
    """Return the parser of all commands. A command's own options are added as it parses.

    typed: the command whose options are added at once, for a caller that looks at them without parsing.
    """
    top = Parser(
        prog="harness",
        description="Proves that a distributed trainer does what its configuration says.",
        epilog=EXIT_CODES_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    top.add_argument("--version", action=Version, nargs=0, help="of the harness, its records, torch and Python")
    commands = top.add_subparsers(metavar="COMMAND", title="commands", required=True, parser_class=CommandParser)
    for name, (package, help) in all_commands().items():
        description = f"{help[0].upper()}{help[1:]}" + ("" if help.endswith("?") else ".")
        command_parser = commands.add_parser(name, command=name, package=package, help=help, description=description)
        if name == typed:
            command_parser.add_options()
    return top
