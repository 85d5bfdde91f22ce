"""What a person reads, on stdout and stderr. Who stops reading (`harness matrix | head -1`) changes no verdict."""

from __future__ import annotations

import os
import sys
from typing import TextIO


class OutputError(Exception):
    """What was found cannot be shown. The message says why."""


def say(*parts: object, to: TextIO | None = None, sep: str = "\n", end: str = "\n") -> None:
    """Prints at once, to stdout if nothing else is said. Raises OutputError where that cannot take it: a full disk."""
    stream = sys.stdout if to is None else to
    try:
        print(*parts, sep=sep, end=end, file=stream, flush=True)
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
