"""FSDP2's units in the words of a report."""

from __future__ import annotations

from collections.abc import Iterable

from harness.core.case.measured import Unit


def units_text(units: Iterable[Unit], shards: int, *, most: int = 12) -> str:
    """In the words of a report: "tok_embeddings, norm, output (3 parameters) kept; layers.0 (9) freed"."""
    texts = [f"{modules_text(unit.parameters)} ({len(unit.parameters)}) {_kept_text(unit, shards)}" for unit in units]
    more = f"; and {len(texts) - most} more" if len(texts) > most else ""
    return "; ".join(texts[:most]) + more


def _kept_text(unit: Unit, shards: int) -> str:
    return "whole" if shards == 1 else {1: "kept", shards: "freed"}.get(unit.degree, f"over {unit.degree} ranks")


def modules_text(parameters: Iterable[str]) -> str:
    """The blocks and other modules that parameters belong to; of one parameter alone, its own module."""
    names = [fqn.removesuffix(".weight") for fqn in parameters]
    if len(names) == 1:
        return names[0]
    modules = list(dict.fromkeys(".".join(name.split(".")[: 2 if name.startswith("layers.") else 1]) for name in names))
    return ", ".join(modules) if len(modules) < 5 else f"{modules[0]} to {modules[-1]}"
