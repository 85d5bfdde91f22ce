"""A finding: one place where a check fails, as data. harness/core/report makes the text, the page and the JSON of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from harness.core.plan.slices import Slice

KINDS = ("parameter", "module", "unit", "wrapper", "group", "collective", "setting", "feature", "process", "file")
"""What a finding may be about. A unit is FSDP's; a process is a rank's own."""


@dataclass(frozen=True)
class Limit:
    """A number that is right from `least` to `most`; None: no bound on that side."""

    least: float | None = None
    """The smallest right number, in the unit of the finding."""
    most: float | None = None
    """The largest right number, in the unit of the finding."""


@dataclass(frozen=True)
class Part:
    """A slice of a parameter."""

    intervals: Slice
    """Half-open intervals, one a dim; one alone where `flat`."""
    shape: tuple[int, ...]
    """Shape of the whole parameter; its number of elements alone where `flat`."""
    flat: bool = False
    """Whether the slice is one of the elements in a row, as FSDP1 and ZeRO cut."""


@dataclass(frozen=True)
class Bound:
    """How far observed may be from expected."""

    number: float
    """In the unit of the finding; relative where that has none."""
    how: str = ""
    """How the number was derived, for a person."""


Value = str | bool | int | float | None | Limit | Part | tuple[Any, ...]
"""What is expected or observed: a number in the finding's unit, ranks, a slice, or a word such as "freed". None: nothing."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One place where a check fails: where, what was expected and what was observed."""

    check: str = ""
    """The name of the check; verdict_of puts it in."""
    launch: str = ""
    """Which launch of a case that resumes: saved_1, saved_2; empty for the last one."""
    ranks: tuple[int, ...] = ()
    """Global ranks, ascending; empty where it is of no rank."""
    step: int | None = None
    """The training step, from 1; None where it is of no step."""
    phase: str = ""
    """Phase of the step, as in evidence.records.Collective: forward, backward, optimizer, ..."""
    kind: str = ""
    """What it is about, of KINDS; empty where `quantity` says it all."""
    name: str = ""
    """Which one: a parameter's or module's fqn, a setting, a file."""
    quantity: str = ""
    """What of it was compared: gradient, exp_avg, placement, loss, ..."""
    axis: str = ""
    """The plan's axis that `group` forms; empty where it forms none."""
    group: tuple[int, ...] = ()
    """Global ranks over which a collective ran, or that a group should have."""
    expected: Value = None
    """What the plan, the reference or the recipe says."""
    observed: Value = None
    """What the evidence shows."""
    unit: str = ""
    """Unit of both: bytes, ranks, elements, "of the largest entry", ...; empty for plain numbers and words."""
    bound: Bound | None = None
    """How far off observed may be; None where it has to be equal."""
    note: str = ""
    """What a person should also know."""

    @classmethod
    def at(cls, rank: int, expected: Value, observed: Value, **fields: Any) -> Self:
        """Return a finding about a single rank; `fields` are the other fields of Finding."""
        return cls(ranks=(rank,), expected=expected, observed=observed, **fields)

    @property
    def rank(self) -> int | None:
        """Return the global rank that the finding is about. None if it is about several, or about none."""
        return self.ranks[0] if len(self.ranks) == 1 else None
