"""What a person reads, on stdout and stderr. A reader that stops (`harness matrix | head -1`) changes no verdict."""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from harness.core.evidence.text import visible

COLOURS = {"PASS": 32, "XFAIL": 32, "FAIL": 31, "UNKNOWN": 33, "ERROR": 33, "SKIPPED": 33}
"""Verdict -> the number that a terminal has for green, red or yellow."""
VERDICT = re.compile(rf"(?<![\w.-])({'|'.join(COLOURS)})(?![\w-])")


class OutputError(Exception):
    """What was found cannot be shown. The message says why."""


def say(*parts: object, to: TextIO | None = None, sep: str = "\n", end: str = "\n") -> None:
    """Print at once, to stdout by default, what a trainer, a file or git wrote never as a command to the terminal.

    Raises OutputError where the stream cannot take it: a full disk.
    """
    stream = sys.stdout if to is None else to
    write(coloured(visible(sep.join(map(str, parts))), stream) + end, stream)


def coloured(text: str, stream: TextIO) -> str:
    """Return text with its verdicts in colour, where a terminal shows it and NO_COLOR is not set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not (stream and stream.isatty()):
        return text
    return VERDICT.sub(lambda found: f"\033[{COLOURS[found[0]]}m{found[0]}\033[0m", text)


def write(text: str, stream: TextIO) -> None:
    """Print text as it is, with the sequences that a terminal obeys. Raises OutputError."""
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:
        _silence(stream)
    except OSError as error:
        _silence(stream)
        raise OutputError(f"what was found cannot be shown: {error.strerror}") from error


def complain(text: str) -> None:
    """Why something could not be done, for the person who typed it."""
    say(f"harness: {text}", to=sys.stderr)


def any_letters() -> None:
    """A terminal or locale that lacks a letter shows its number."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _silence(stream: TextIO) -> None:
    """What it still holds back goes nowhere, so that the end of the process meets no second error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
