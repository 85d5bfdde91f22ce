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


def answer(args: argparse.Namespace, kind: str, data: Data, *text: object) -> None:
    """Say the text, or keep the document for main to print. data: what takes time is a function."""
    if not args.json:
        return print_lines(*text) if text else None
    args.answered = document_text(kind, data() if callable(data) else data)


def is_document_asked(argv: Sequence[str]) -> bool:
    """Return whether a document is wanted of what could not be parsed. Words behind -- are another command's."""
    return "--json" in [*argv, "--"][: [*argv, "--"].index("--")]


@contextmanager
def stdout_for_document_only() -> Iterator[None]:
    """Send to stderr what a trainer, a library or a command that is recorded prints meanwhile."""
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
    """Print what the command answered, or why it did not. Raises OutputError."""
    error_document = document_text("error", {"message": getattr(args, "failed", ""), "exit": code})
    write_text_as_is(getattr(args, "answered", error_document) + "\n", sys.stdout)
