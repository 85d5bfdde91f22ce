"""What several commands let a person type. Nothing here takes long to import: help and completion need no more."""

from __future__ import annotations

import argparse
import importlib
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from harness.core import rings
from harness.core.case import case_files
from harness.core.case.launching import LONGEST_SECONDS, SERVERS
from harness.core.cli.typed import remember_typed
from harness.core.evidence.near_names import did_you_mean
from harness.core.run.options import Options
from harness.reference.config import DTYPES


class BadInput(Exception):
    """What was typed cannot be done. The message is for the person who typed it."""


class UsageError(SystemExit):
    """What was typed is not understood, and that was printed. It ends the process with code 2 if nothing catches it."""

    def __init__(self, message: str) -> None:
        super().__init__(2)
        self.message = message


class Parser(argparse.ArgumentParser):
    """A parser whose options are typed in full: another may begin like them one day, and main() looks for --bisect.

    It notes in `args.typed` which options were typed.
    """

    def __init__(self, **how: Any) -> None:
        super().__init__(allow_abbrev=False, **how)
        remember_typed(self)

    def error(self, message: str) -> NoReturn:
        """Print usage and message to stderr, and raise UsageError."""
        self.print_usage(sys.stderr)
        self._print_message(f"{self.prog}: error: {message}\n", sys.stderr)
        raise UsageError(message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Parse, and refuse an unknown option with the command's own usage; argparse leaves that to the parser of all."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown and self._subparsers is None:
            questions = [did_you_mean(word.partition("=")[0], self._option_string_actions) for word in unknown]
            suggestion = next(filter(None, questions), "")
            self.error(f"unrecognized arguments: {' '.join(unknown)}{suggestion}")
        return parsed, unknown


class CommandParser(Parser):
    """The parser of one command. It imports the command's file only when it parses: importing all of them takes a while."""

    def __init__(self, command: str, package: str, **how: Any) -> None:
        """package: where the command's files are."""
        super().__init__(**how)
        self.command = command
        self.package = package
        self.has_options = False
        self.set_defaults(command=command, package=package, json=False)

    def add_options(self) -> None:
        """Add the options of the command, and those that rings add to it. A second call does nothing."""
        if not self.has_options:
            self.has_options = True
            importlib.import_module(f"{self.package}.{self.command}").add(self)
            for add in rings.functions_for("options", self.command):
                add(self)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.add_options()
        return super().parse_known_args(args, namespace)


def add_json(parser: argparse.ArgumentParser) -> None:
    """Add --json: one document on stdout, and all else on stderr."""
    parser.add_argument("--json", action="store_true", help="print one JSON document, all else to stderr")


def add_cases(parser: argparse.ArgumentParser) -> None:
    """Add --cases, the folder of case files. Without it the value is None, which means cases/ here."""
    parser.add_argument(
        "--cases",
        metavar="DIR",
        help=f"folder of YAML files; default {case_files.CASES_FOLDER};"
        f" {case_files.BUILTIN_WORD}: those that come with the harness",
    )


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Add the option -k EXPR alone. It is stored as `expression`, by default empty."""
    parser.add_argument(
        "-k", dest="expression", default="", metavar="EXPR", help='parts of names, as in pytest: "hsdp and not sgd"'
    )


def add_jobs(parser: argparse.ArgumentParser, help_text: str) -> None:
    parser.add_argument("-j", "--jobs", type=positive_int, metavar="N", help=help_text)


def add_recipe(parser: argparse.ArgumentParser) -> None:
    """Add --seed and --dtype, which change the recipe of a case; None for the case's own."""
    parser.add_argument("--seed", type=int, metavar="N", help="another seed; goldens do not apply")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        metavar="DTYPE",
        help=f"judge by the recipe in {', '.join(DTYPES)}, for a trainer that computes in no other",
    )


def add_how_to_run(parser: argparse.ArgumentParser, server_choices: Sequence[str] = (), server_help: str = "") -> Any:
    """Add the options on how ranks are started, --trainer and --out among them, and return their group.

    server_choices, server_help: further choices of --server, what they mean.
    """
    group = parser.add_argument_group("how ranks are started")
    add_trainer(group)
    group.add_argument(
        "--source", metavar="PATH|VERSION", help="a checkout of that trainer, or a release that pip brings"
    )
    group.add_argument("--launcher", default="local", choices=("local", "torchrun"))
    group.add_argument(
        "--torchrun-args", default="", metavar="ARGS", help='for several nodes: "--nnodes 2 --rdzv-endpoint HOST:PORT"'
    )
    group.add_argument(
        "--server",
        choices=(*SERVERS, *server_choices),
        help=f"the process that forks ranks: resident is kept for the next commands, own ends with this one; default resident, "
        f"in CI own{server_help}",
    )
    group.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    group.add_argument("--ranks-per-gpu", type=positive_int, default=1, metavar="N", help="may share one; default 1")
    group.add_argument(
        "--backend",
        choices=("nccl", "gloo"),
        default="",
        help="on GPUs; default nccl, gloo where ranks share one it cannot",
    )
    add_out(group, help="where evidence goes; default out")
    usual = Options().timeout
    group.add_argument(
        "--timeout", type=seconds_within_limit, metavar="S", help=f"seconds for one launch; default {usual:g}"
    )
    return group


def add_trainer(parser: Any) -> None:
    """Add --trainer. Without it the value is None, and `default_trainer` chooses."""
    parser.add_argument(
        "--trainer",
        metavar="NAME|FILE.py",
        help="the trainer under test; default harness_trainer of the pytest configuration, else the one *_adapter.py or "
        "adapter.py of this folder, else llama3, which comes with the harness",
    )


def add_out(parser: Any, help: str) -> None:
    parser.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help=help)


def positive_number(text: str) -> float:
    """Return the number that was typed, above 0 and finite, as an option's type. Raises ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, got {text}")
    return value


def seconds_within_limit(text: str) -> float:
    """Return the seconds that were typed, above 0 and at most LONGEST_SECONDS. Raises ArgumentTypeError or ValueError."""
    value = float(text)
    if not 0 < value <= LONGEST_SECONDS:
        raise argparse.ArgumentTypeError(f"must be above 0 and at most {LONGEST_SECONDS:g} seconds, got {text}")
    return value


def add_again(parser: argparse._ActionsContainer, *, default: int) -> None:
    """Add --again, how often a failing case is rerun in fresh ranks; `default` times if it is not typed."""
    help_text = f"make a failing case again N times, in fresh ranks, to see whether it always fails; default {default}"
    parser.add_argument("--again", type=whole_number, default=default, metavar="N", help=help_text)


def positive_int(text: str) -> int:
    return int(positive_number(str(int(text))))


def whole_number(text: str) -> int:
    """Return the whole number from 0 that was typed. Raises ArgumentTypeError for any other text."""
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"must be a whole number from 0, got {text}")
    return int(text)
