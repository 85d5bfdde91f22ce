"""What a command answers: text for a person, or with --json one document on stdout and everything else on stderr."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from typing import Any

from harness.core.report.as_data import document_text
from harness.core.report.output import print_lines, write_text_as_is

Data = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


def print_or_keep_document(args: argparse.Namespace, kind: str, data: Data, *text: object) -> None:
    """Print the text, or with --json keep the document of this kind in `args.answered`, for main to print at the end.

    data: the document's data, or a function that returns it, called only with --json. Without text nothing is printed.
    """
    if not args.json:
        return print_lines(*text) if text else None
    args.answered = document_text(kind, data() if callable(data) else data)


def is_document_asked(argv: Sequence[str]) -> bool:
    """Return whether --json is among the words, for a command line that could not be parsed.

    Words behind -- are another command's.
    """
    return "--json" in [*argv, "--"][: [*argv, "--"].index("--")]


@contextmanager
def stdout_for_document_only() -> Iterator[None]:
    """Send stdout to stderr while the block runs: what a trainer, a library or a command that is recorded prints
    meanwhile."""
    with ExitStack() as stack:
        if sys.stdout is not None and sys.stderr is not None:  # neither was closed by who called
            sys.stdout.flush()
            saved_stdout = os.dup(1)
            stack.callback(os.close, saved_stdout)
            stack.callback(os.dup2, saved_stdout, 1)
            os.dup2(2, 1)
        stack.enter_context(redirect_stdout(sys.stderr))
        yield


def print_document(args: argparse.Namespace, code: int) -> None:
    """Print to stdout the document that the command kept, or an error document with its message and exit code.

    Raises OutputError.
    """
    error_document = document_text("error", {"message": getattr(args, "failed", ""), "exit": code})
    write_text_as_is(getattr(args, "answered", error_document) + "\n", sys.stdout)
