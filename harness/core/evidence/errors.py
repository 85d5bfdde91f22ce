"""Errors that are printed in one line, and the line of a person's file in which an error is."""

from __future__ import annotations

import traceback
from pathlib import Path


def error_text(path: Path, error: BaseException) -> str:
    """Return a text of an error, with the line of the file `path` that raised it, or that imported what raised it.

    A SyntaxError may be in a file that it imports: the text names that file.
    """
    if isinstance(error, SyntaxError):
        file = "" if str(path) == error.filename else f"{error.filename}, "
        return f"{file}line {error.lineno}, `{(error.text or '').strip()}`: {type(error).__name__}: {error.msg}"
    text = f"{type(error).__name__}: {error}" if isinstance(error, ImportError) else repr(error)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    if not frames:
        return text
    return f"line {frames[-1].lineno}, `{frames[-1].line}`: {text}"


class UserError(Exception):
    """Something requested cannot be done, by no mistake of the harness: only the message is printed, without a stack."""


class CheckError(ValueError):
    """A file of harness/core/checks that is no check."""
