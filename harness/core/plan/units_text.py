"""FSDP2's units in the words of a report."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.measured import Unit


def units_text(units: Iterable[Unit], shards: int, *, most_units: int = 12) -> str:
    """Return "norm, output (2) kept; layers.0 (9) freed": each unit's modules, number of parameters, and policy after
    forward.

    Units beyond `most_units` are only counted. shards: FSDP's shard degree.
    """
    texts = [f"{modules_text(unit.parameters)} ({len(unit.parameters)}) {_policy_text(unit, shards)}" for unit in units]
    ending = f"; and {len(texts) - most_units} more" if len(texts) > most_units else ""
    return "; ".join(texts[:most_units]) + ending


def _policy_text(unit: Unit, shards: int) -> str:
    """Return "kept" or "freed" for a unit after forward, "over 2 ranks" if it is partly gathered; "whole" if nothing is
    sharded."""
    return "whole" if shards == 1 else {1: "kept", shards: "freed"}.get(unit.degree, f"over {unit.degree} ranks")


def modules_text(parameters: Iterable[str]) -> str:
    """Return the blocks and other modules of these parameters: "layers.0, norm", or "layers.0 to norm" for five or more.

    Of one parameter alone it is its own module. There must be at least one parameter.
    """
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
