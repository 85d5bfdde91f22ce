"""Which options a person typed: a command refuses those that would have no effect."""

from __future__ import annotations

import argparse
import functools
from typing import Any

KINDS_OF_ACTION = (None, "store", "store_true", "append")
"""argparse's names of what options do here; None is its name for the usual one."""


def remember_typed(parser: argparse.ArgumentParser) -> None:
    """Make the parser's options note in `args.typed` that they were typed, each by its longest spelling.

    Call it before adding them.
    """
    for kind in KINDS_OF_ACTION:
        parser.register("action", kind, _make_remembering_action(parser._registry_get("action", kind)))


def action_classes_of(parser: argparse.ArgumentParser) -> set[type[argparse.Action]]:
    """Return the classes of the actions that a parser has for its options."""
    return {parser._registry_get("action", kind) for kind in KINDS_OF_ACTION}


@functools.cache
def _make_remembering_action(action: type[argparse.Action]) -> type[argparse.Action]:
    """Return a class of actions that does as this one, and also notes in the namespace which option was typed."""

    class Remembering(action):  # type: ignore[valid-type, misc]
        def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
            super().__call__(parser, namespace, values, option_string)
            if option_string is not None:
                namespace.typed = (*typed_options(namespace), max(self.option_strings, key=len))

    return Remembering


def typed_options(args: argparse.Namespace) -> tuple[str, ...]:
    """Return the options that were typed, in their order; () if none was.

    An option left at its default is not among them; one typed with that value is.
    """
    return getattr(args, "typed", ())
