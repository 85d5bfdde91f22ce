"""What the matrix covers: every option a user can request, and every pair of options, with its case or its reason.

The options are those of options.py. Two options of one kind are alternatives and no pair. A pair is covered by a case that has
both and that the trainer runs. Without such a case, validation or the trainer must refuse both together, with a reason. A pair
that is neither covered nor refused is MISSING, and a test fails.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations

from harness.core.case.case import Case, CaseError
from harness.core.case.loading import from_json
from harness.core.case.options import Option, merge, options

Unsupported = Callable[[Case], str | None]

MISSING = "MISSING: neither a case nor a reason"


@dataclass(frozen=True)
class Pair:
    """Two options of different kinds."""

    one: Option
    other: Option
    cases: tuple[str, ...] = ()
    """Those that have both."""
    by_default: bool = False
    """Whether one of these is of the default tier."""
    reason: str = ""
    """Why there can be none."""

    @property
    def missing(self) -> bool:
        return self.reason == MISSING


def pairs(cases: Sequence[Case], unsupported: Unsupported) -> list[Pair]:
    """unsupported: why a trainer cannot run a case; None if it can."""
    every = options()
    run = [case for case in cases if not any(map(unsupported, case.launches.values()))]
    having = {option.name: {case.name for case in run if option.holds(case)} for option in every}
    order = [case.name for case in run]
    usual = {case.name for case in run if case.tier == "default"}
    found = []
    for one, other in combinations(every, 2):
        if one.kind != other.kind:
            both = tuple(sorted(having[one.name] & having[other.name], key=order.index))
            reason = "" if both else _reason(one, other, unsupported)
            found.append(Pair(one, other, both, not usual.isdisjoint(both), reason))
    return found


def _reason(one: Option, other: Option, unsupported: Unsupported) -> str:
    """Return why no case can request both."""
    fragment = merge(one.fragment, other.fragment)
    try:
        case = from_json({"name": "pair", "why": "-"} | fragment)
    except CaseError as error:
        return str(error).removeprefix(": case 'pair': ")
    if not (one.holds(case) and other.holds(case)):
        return f"one excludes the other: together they are {case.dims}"
    return unsupported(case) or MISSING


# ---- what is shown


def pairs_text(found: Sequence[Pair]) -> str:
    """A line a pair: its first case, or the reason why there is none."""
    width = max(len(_title(pair)) for pair in found)
    lines = [f"{_title(pair):<{width}}  {_state(pair)}" for pair in found]
    covered, usual = sum(bool(pair.cases) for pair in found), sum(pair.by_default for pair in found)
    missing = sum(pair.missing for pair in found)
    refused = len(found) - covered - missing
    total = (
        f"{len(found)} pairs of options: {covered} in a case ({usual} in one of the default tier), {refused} refused with a"
        f" reason, {missing} missing"
    )
    return "\n".join([*lines, "", total])


def _title(pair: Pair) -> str:
    return f"{pair.one.name} x {pair.other.name}"


def _state(pair: Pair) -> str:
    if not pair.cases:
        return pair.reason if pair.missing else f"refused: {pair.reason}"
    more = f" and {len(pair.cases) - 1} more" if len(pair.cases) > 1 else ""
    return pair.cases[0] + more
