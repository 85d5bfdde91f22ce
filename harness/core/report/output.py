"""Output for a person, on stdout and stderr.

A reader that closes the pipe (`harness matrix | head -1`) changes no verdict.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from harness.core.evidence.text import escape_control_characters

COLOURS = {"PASS": 32, "XFAIL": 32, "FAIL": 31, "UNKNOWN": 33, "ERROR": 33, "SKIPPED": 33}
"""Verdict -> the number that a terminal has for green, red or yellow."""
VERDICT_PATTERN = re.compile(rf"(?<![\w.-])({'|'.join(COLOURS)})(?![\w-])")


class OutputError(Exception):
    """The output cannot be written. The message says why."""


def print_lines(*parts: object, to: TextIO | None = None, sep: str = "\n", end: str = "\n") -> None:
    """Print the parts, joined by `sep`, and flush, to stdout by default. Verdicts are coloured on a terminal.

    Control characters are escaped: text of a trainer, a file or git is never a command to the terminal. Raises
    OutputError if the stream cannot be written, as on a full disk.
    """
    stream = sys.stdout if to is None else to
    write_text_as_is(colour_verdicts(escape_control_characters(sep.join(map(str, parts))), stream) + end, stream)


def colour_verdicts(text: str, stream: TextIO) -> str:
    """Return the text with its verdicts in colour; unchanged if the stream is no terminal that shows it, or NO_COLOR is
    set."""
    if os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb" or not (stream and stream.isatty()):
        return text
    return VERDICT_PATTERN.sub(lambda match: f"\033[{COLOURS[match[0]]}m{match[0]}\033[0m", text)


def write_text_as_is(text: str, stream: TextIO) -> None:
    """Write the text to the stream and flush, with the sequences that a terminal obeys.

    A reader that closed the pipe is ignored, and the rest discarded. Raises OutputError for any other failure.
    """
    try:
        print(text, end="", file=stream, flush=True)
    except BrokenPipeError:
        _discard_buffer(stream)
    except OSError as error:
        _discard_buffer(stream)
        raise OutputError(f"what was found cannot be shown: {error.strerror}") from error


def print_error(text: str) -> None:
    """Print "harness: TEXT" to stderr, for the person who typed the command. text: why something could not be done."""
    print_lines(f"harness: {text}", to=sys.stderr)


def escape_unprintable_letters() -> None:
    """Make stdout and stderr print an escape for a letter that the terminal or locale lacks, instead of raising an
    error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _discard_buffer(stream: TextIO) -> None:
    """Send the rest of a stream's buffer to nowhere, so that the end of the process raises no second error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
