"""Which faults the default tier notices although nobody says on which case they show, as a developer's mistake does not.

A fault whose own case is of the default tier and that is caught there is noticed. Of any other the cases of the tier are
tried, those most like its own first, until a law does not hold that holds without the fault. One that fires in none of the
cases tried is not counted: there is nothing to notice.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness import ROOT
from harness.evidence.store import write_text
from harness.faults import Fault
from harness.judge.result import Verdict
from harness.run import catalogue
from harness.run.options import Options
from harness.run.run_case import run_case
from harness.spec.case import Case
from harness.spec.composition import ranks, values
from harness.spec.loading import load_all

STORED = ROOT / "harness" / "faults" / "unaimed.json"
PAGE = ROOT / "docs" / "faults.md"
MOST = 12  # cases that are tried


@dataclass(frozen=True)
class Searched:
    """A fault whose own case is of another tier. case: where it is noticed, empty if nowhere; broken: the laws that do not
    hold there. tried: cases of the default tier on which it ran before. fired: whether its code ran in any of them."""

    fault: str
    case: str
    broken: tuple[str, ...]
    tried: tuple[str, ...]
    fired: bool


def elsewhere(faults: Sequence[Fault], cases: Sequence[Case]) -> list[Fault]:
    """The faults whose own case is not in the default tier, and does not wait for a compiler."""
    tiers = {case.name: case.tier for case in cases}
    return [fault for fault in faults if tiers.get(fault.case) == "nightly"]


def likeliest(fault: Fault, cases: Sequence[Case]) -> list[Case]:
    """The default tier's cases: first those that request most of what the fault's own requests, whatever the degree, of
    these the ones that request the least besides, of these the ones that request just the same, of these the smallest."""
    own = _as_requested(next(case for case in cases if case.name == fault.case))

    def unlike(case: Case) -> tuple[int, int, int, int]:
        asked = _as_requested(case)
        both = own.keys() & asked.keys()
        return -len(both), len(asked.keys() - own.keys()), sum(own[key] != asked[key] for key in both), ranks(case)

    return sorted((case for case in cases if case.tier == "default" and not case.expected_failure), key=unlike)


def search(fault: Fault, cases: Sequence[Case], options: Options) -> Searched:
    tried: list[str] = []
    fired = False
    for case in likeliest(fault, cases)[:MOST]:
        judgement = run_case(case, replace(options, fault=catalogue.spec_of(fault)))
        fired = fired or bool(judgement.fired)
        broken = tuple(r.check for r in judgement.results if r.verdict in (Verdict.FAIL, Verdict.UNKNOWN))
        if judgement.fired and broken and run_case(case, options).verdict is Verdict.PASS:
            return Searched(fault.name, case.name, broken, tuple(tried), True)
        tried.append(case.name)
    return Searched(fault.name, "", (), tuple(tried), fired)


def store(found: Sequence[Searched], stored: Path = STORED) -> None:
    """In the place of what is stored of the same faults."""
    now = {one.fault: one for one in load(stored)} | {one.fault: one for one in found}
    write_text(stored, json.dumps([asdict(one) for one in now.values()], indent=1) + "\n")


def load(stored: Path = STORED) -> list[Searched]:
    records = json.loads(stored.read_text(encoding="utf-8")) if stored.exists() else []
    return [Searched(**{**r, "broken": tuple(r["broken"]), "tried": tuple(r["tried"])}) for r in records]


def noticed(
    done: Sequence[catalogue.Attempt], cases: Sequence[Case], found: Sequence[Searched]
) -> Iterator[tuple[str, str]]:
    """Every fault that can fire in the default tier, with the case that notices it, or ""."""
    tiers, searched = {case.name: case.tier for case in cases}, {one.fault: one for one in found}
    caught = {catalogue.Outcome.CAUGHT, catalogue.Outcome.OTHERWISE}
    for attempt in done:
        one = searched.get(attempt.fault)
        if tiers.get(attempt.case) == "default":
            yield attempt.fault, attempt.case if attempt.outcome in caught else ""
        elif one is not None and one.fired:
            yield attempt.fault, one.case if tiers.get(one.case) == "default" else ""


BEGIN, END = "<!-- line: harness faults --accept -->\n", "<!-- end of line -->\n"


def line(done: Sequence[catalogue.Attempt], cases: Sequence[Case], found: Sequence[Searched]) -> str:
    every = [case for _, case in noticed(done, cases, found)]
    share = 100 * sum(map(bool, every)) / len(every) if every else 0.0
    return (
        f"`make matrix`, told neither fault nor case, notices {share:.3g}% of the faults of the catalogue that fire in it"
        " (`harness faults --unaimed`)."
    )


def with_line(text: str) -> str:
    """The page with its line made anew."""
    head, _, rest = text.partition(BEGIN)
    told = line(catalogue.from_json(catalogue.STORED.read_text(encoding="utf-8")), load_all(), load())
    return head + BEGIN + told + "\n" + END + rest.partition(END)[2]


def accept(found: Sequence[Searched] = ()) -> None:
    """Stores what was searched, and makes the line of docs/faults.md of all that is stored."""
    store(found)
    write_text(PAGE, with_line(PAGE.read_text(encoding="utf-8")))


def report(done: Sequence[catalogue.Attempt], cases: Sequence[Case], found: Sequence[Searched]) -> str:
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


def _as_requested(case: Case) -> dict[str, object]:
    """What the launches of a case say besides the usual, by field."""
    usual = values(Case("", ""))
    said = {field: value for launched in case.launches.values() for field, value in values(launched) - usual}
    return said | ({"resume": True} if case.resume else {})
