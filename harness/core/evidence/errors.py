"""Errors that a person is told in one line, and where in a file that somebody wrote one is."""

from __future__ import annotations

import traceback
from pathlib import Path


def error_in(path: Path, error: BaseException) -> str:
    """path: the file that was loaded, whose own line is said, though what it imports may have raised. What cannot be read as
    Python may be in a file that it imports."""
    if isinstance(error, SyntaxError):
        file = "" if str(path) == error.filename else f"{error.filename}, "
        return f"{file}line {error.lineno}, `{(error.text or '').strip()}`: {type(error).__name__}: {error.msg}"
    what = f"{type(error).__name__}: {error}" if isinstance(error, ImportError) else repr(error)
    here = [frame for frame in traceback.extract_tb(error.__traceback__) if Path(frame.filename) == path]
    return f"line {here[-1].lineno}, `{here[-1].line}`: {what}" if here else what


class ToldError(Exception):
    """Something asked for cannot be done, by no mistake of the harness: the message is all that a person is told."""


class CheckError(ValueError):
    """A file of harness/core/checks that is no check."""
