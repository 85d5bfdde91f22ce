"""Completion of the command line by argcomplete, where that is installed: the shell starts the harness and asks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable

from harness.cli.typed import actions_of

ASKED = "_ARGCOMPLETE"
"""The variable by which the shell asks."""


def complete(parser: Callable[[str], argparse.ArgumentParser]) -> None:
    """Answer the shell and end this process, if it was the shell that started it.

    parser: makes the parser of the command that is typed.
    """
    if ASKED not in os.environ:
        return
    import argcomplete

    typed = os.environ.get("COMP_LINE", "").split()
    top = parser(typed[1] if len(typed) > 1 else "")
    argcomplete.safe_actions.update(actions_of(top))  # of others it ignores what was typed, such as --cases
    argcomplete.autocomplete(top)


def case_names(parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the names that may stand for CASE."""
    from harness.cli.work.cases import cases_of
    from harness.spec.case import CaseError

    try:
        return [case.name for case in cases_of(parsed_args)]
    except CaseError:
        return []
