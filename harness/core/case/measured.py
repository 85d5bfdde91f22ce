"""Traits that neither a case nor an adapter declares: they are measured once, when the evidence of a launch is complete."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


class Unit(NamedTuple):
    """Parameters that FSDP2 gathers together."""

    parameters: tuple[str, ...]
    """Their fqns, in the wrapper's order."""
    degree: int
    """Over how many ranks they stay cut after forward; 1 if they stay whole."""
    backward_gathers: bool = True
    """Whether backward gathers a unit that was freed after forward."""
    modules: int = 1
    """Number of modules that were given to `fully_shard` as one."""


Observed = Mapping[int, tuple[Unit, ...]]
"""By rank, the units that its wrappers claim; an empty tuple if they claim none."""


@dataclass(frozen=True)
class MeasuredTraits:
    """What one launch or recording showed of its trainer, where a plan needs it and neither case nor adapter declares it.

    A launch sets `units`, `flat_order` and `torch`; a recording sets `units` and `cut_dims`. The default is NOTHING_MEASURED,
    with which a launch is planned before it has run.
    """

    units: Observed | None = None
    """By rank, FSDP2's units as its wrappers claim them; None if the case or the adapter names them, or the wrapper is
    another one."""
    flat_order: tuple[str, ...] = ()
    """Fqns in the order of FSDP1's vectors; empty if the adapter declares it, or the wrapper is another one."""
    cut_dims: Mapping[str, int] = field(default_factory=dict)
    """By fqn, the dim along which FSDP2 cuts a parameter; a parameter that is not named is cut along dim 0."""
    torch: str = ""
    """Release of torch that the ranks ran; empty for the oldest one supported."""


NOTHING_MEASURED = MeasuredTraits()


def to_json(measured: MeasuredTraits) -> dict[str, Any]:
    """Return the record as plain values, by field name; ranks that claim the same units share one entry of `units`."""
    kinds: dict[tuple[Unit, ...], list[int]] = {}
    for rank, units in (measured.units or {}).items():
        kinds.setdefault(units, []).append(rank)
    entries: list[dict[str, Any]] = []
    for units, ranks in kinds.items():
        entries.append({"ranks": ranks, "units": [unit._asdict() for unit in units]})
    by_launch = {"cut_dims": dict(measured.cut_dims), "flat_order": list(measured.flat_order)}
    return vars(measured) | by_launch | {"units": None if measured.units is None else entries}


def from_json(record: Mapping[str, Any]) -> MeasuredTraits:
    """Return the record that to_json turned into plain values.

    Raise KeyError, TypeError or ValueError for anything else.
    """
    by_rank: dict[int, tuple[Unit, ...]] = {}
    for entry in record["units"] or ():
        units = tuple(Unit(**{**unit, "parameters": tuple(unit["parameters"])}) for unit in entry["units"])
        by_rank |= dict.fromkeys(entry["ranks"], units)
    observed = None if record["units"] is None else dict(sorted(by_rank.items()))
    return MeasuredTraits(**{**record, "units": observed, "flat_order": tuple(record["flat_order"])})
