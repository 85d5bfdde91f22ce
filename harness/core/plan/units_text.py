"""FSDP2's units in the words of a report."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.measured import Unit


def units_text(units: Iterable[Unit], shards: int, *, most_units: int = 12) -> str:
    """Return "tok_embeddings, norm, output (3 parameters) kept; layers.0 (9) freed", as reports show units."""
    texts = [f"{modules_text(unit.parameters)} ({len(unit.parameters)}) {_policy_text(unit, shards)}" for unit in units]
    ending = f"; and {len(texts) - most_units} more" if len(texts) > most_units else ""
    return "; ".join(texts[:most_units]) + ending


def _policy_text(unit: Unit, shards: int) -> str:
    """Return whether a unit is kept or freed after forward, or over how many ranks it then is."""
    return "whole" if shards == 1 else {1: "kept", shards: "freed"}.get(unit.degree, f"over {unit.degree} ranks")


def modules_text(parameters: Iterable[str]) -> str:
    """Return the blocks and other modules that parameters belong to; of one parameter alone, its own module."""
    names = [fqn.removesuffix(".weight") for fqn in parameters]
    if len(names) == 1:
        return names[0]
    modules = []
    for name in names:
        parts = name.split(".")
        depth = 2 if name.startswith("layers.") else 1
        modules.append(".".join(parts[:depth]))
    modules = list(dict.fromkeys(modules))
    return ", ".join(modules) if len(modules) < 5 else f"{modules[0]} to {modules[-1]}"
