"""Which faults the default tier notices, of those that can fire in it: aimed at a case of it, or found there by a search.

A fault whose own case is of the default tier and that is caught there is noticed. Of any other a search among the cases of
the tier is stored (tools/unaimed_faults.py). One that fired in none of the cases tried is not counted: there is nothing to
notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import ROOT
from harness.evidence.store import write_text
from harness.faults.attempt import Attempt, Outcome
from harness.spec.case import Case

STORED = ROOT / "tools" / "unaimed.json"


@dataclass(frozen=True)
class Searched:
    """A fault whose own case is of another tier. case: where it is noticed, empty if nowhere; broken: the checks that do not
    hold there. tried: cases of the default tier on which it ran before. fired: whether its code ran in any of them."""

    fault: str
    case: str
    broken: tuple[str, ...]
    tried: tuple[str, ...]
    fired: bool


def store(found: Sequence[Searched], stored: Path = STORED) -> None:
    """In the place of what is stored of the same faults."""
    now = {one.fault: one for one in load(stored)} | {one.fault: one for one in found}
    write_text(stored, json.dumps([asdict(one) for one in now.values()], indent=1) + "\n")


def load(stored: Path = STORED) -> list[Searched]:
    records = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else []
    return [Searched(**{**r, "broken": tuple(r["broken"]), "tried": tuple(r["tried"])}) for r in records]


def noticed(done: Sequence[Attempt], cases: Sequence[Case], found: Sequence[Searched]) -> Iterator[tuple[str, str]]:
    """Every fault that can fire in the default tier, with the case that notices it, or ""."""
    tiers, searched = {case.name: case.tier for case in cases}, {one.fault: one for one in found}
    caught = {Outcome.CAUGHT, Outcome.OTHERWISE}
    for attempt in done:
        one = searched.get(attempt.fault)
        if tiers.get(attempt.case) == "default":
            yield attempt.fault, attempt.case if attempt.outcome in caught else ""
        elif one is not None and one.fired:
            yield attempt.fault, one.case if tiers.get(one.case) == "default" else ""


def line(done: Sequence[Attempt], cases: Sequence[Case], found: Sequence[Searched]) -> str:
    every = [case for _, case in noticed(done, cases, found)]
    share = 100 * sum(map(bool, every)) / len(every) if every else 0.0
    return (
        f"`make matrix`, which is told neither the fault nor its case, notices {share:.3g}% of the"
        " faults of the catalogue that fire in it"
        " (`python -m tools.unaimed_faults`)."
    )


def report(done: Sequence[Attempt], cases: Sequence[Case], found: Sequence[Searched]) -> str:
    lines = [f"{one.fault}: {_told(one)}" for one in found]
    every = dict(noticed(done, cases, found))
    seen = sum(map(bool, every.values()))
    share = f"{100 * seen / len(every):.1f} %" if every else "nothing"
    lines += [f"the default tier notices {seen} of {len(every)} faults that fire in it: {share}"]
    return "\n".join([*lines, *(f"  not noticed: {fault}" for fault, case in every.items() if not case)])


def _told(one: Searched) -> str:
    if one.case:
        return f"noticed on {one.case} by {' '.join(one.broken)}"
    return f"{'not noticed' if one.fired else 'never fired'} on {len(one.tried)} cases"
