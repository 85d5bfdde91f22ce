"""Tables of a trainer's names beside the reference's, and names by them."""

from __future__ import annotations

from collections.abc import Mapping


def pairs(text: str) -> dict[str, str]:
    """A table of names written as "theirs=ours theirs=ours"."""
    return dict(pair.split("=") for pair in text.split())


def renamed(name: str, table: Mapping[str, str]) -> str:
    """A dotted name with each of its parts as the table has it: those that it has not stay, those it has nothing for go."""
    return ".".join(filter(None, (table.get(part, part) for part in name.split("."))))
