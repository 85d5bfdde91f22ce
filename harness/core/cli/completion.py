"""Completion of the command line by argcomplete, where that is installed: the shell starts the harness and asks."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterable

from harness.core.cli.typed import action_classes_of

COMPLETION_VARIABLE = "_ARGCOMPLETE"
"""The variable by which the shell asks."""


def answer_completion(parser: Callable[[str], argparse.ArgumentParser]) -> None:
    """Answer the shell and end this process, if the shell started it for completion; return at once otherwise.

    parser: makes the parser of all commands, with the options of the command that is typed.
    """
    if COMPLETION_VARIABLE not in os.environ:
        return
    import argcomplete

    typed = os.environ.get("COMP_LINE", "").split()
    top = parser(typed[1] if len(typed) > 1 else "")
    argcomplete.safe_actions.update(action_classes_of(top))  # of others it ignores what was typed, such as --cases
    argcomplete.autocomplete(top)


def case_names(parsed_args: argparse.Namespace, **_: object) -> Iterable[str]:
    """Return the names that may stand for CASE, for argcomplete. Empty if the cases cannot be loaded."""
    from harness.core.case.case import CaseError
    from harness.core.cli.work.cases import cases_of

    try:
        return [case.name for case in cases_of(parsed_args)]
    except CaseError:
        return []
