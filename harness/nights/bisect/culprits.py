"""What broke or fixed the cases of a night: one search for each cause, between that night and the last one without it.

Cases of one cause are searched for once, by the one of fewest ranks. Another cause of the same two nights is first tried on
the commits that were found for the others. It takes two runs, a search ten.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.case.case import Case
from harness.core.run.matrix import PROBLEMS, unexpected
from harness.core.run.options import Options
from harness.nights.bisect import BisectError, commits
from harness.nights.bisect.search import Found, Tell
from harness.nights.bisect.side_by_side import bisect_report
from harness.nights.changes import Change, State, differs, differs_text, state
from harness.nights.history import Night
from harness.nights.history_text import Told
from harness.nights.nights import Culprit, of_night


@dataclass(frozen=True)
class Where:
    """repo: a clone of the trainer; None if none is named. until: by time.monotonic(), when no other commit is begun."""

    repo: Path | None
    cases: Mapping[str, Case]
    options: Options
    until: float
    tell: Tell


@dataclass(frozen=True)
class Wanted:
    """cases: of one cause, the one of fewest ranks in front. good, bad: the nights to search between."""

    cases: tuple[str, ...]
    cause: str
    good: Night
    bad: Night
    fixed: bool

    @property
    def later(self) -> Night:
        return self.good if self.fixed else self.bad

    @property
    def commits(self) -> tuple[str, str]:
        return self.good.of("commit"), self.bad.of("commit")


def searched(told: Told, where: Where) -> list[Culprit]:
    """Search for all that is newly broken and was green in an earlier night, then for what is newly fixed."""
    found: list[Culprit] = []
    for one in wanted(told):
        found.append(culprit(one, where, found))
    return found


def wanted(told: Told) -> list[Wanted]:
    apart: dict[tuple[str, bool, int, int], list[str]] = {}
    nights: dict[int, Night] = {}
    for change in [*told.of(State.BROKEN, new=True), *told.of(State.FIXED)]:
        between = _nights(change, told.nights)
        if between is not None:
            good, bad = between
            nights |= {id(good): good, id(bad): bad}
            key = (_cause(change), change.state == State.FIXED, id(good), id(bad))
            apart.setdefault(key, []).append(change.case)
    return [
        Wanted(tuple(sorted(cases, key=lambda case: _size(nights[bad], case))), cause, nights[good], nights[bad], fixed)
        for (cause, fixed, good, bad), cases in apart.items()
    ]


def _nights(change: Change, nights: Sequence[Night]) -> tuple[Night, Night] | None:
    """The good one and the bad one; None where it never held."""
    if change.state == State.FIXED:
        return (change.now, change.before) if change.before else None
    earlier = nights[: next(at for at, night in enumerate(nights) if night is change.now)]
    held = (night for night in reversed(earlier) if state(night.outcomes.get(change.case)) == "good")
    good = next(held, None)
    return (good, change.now) if good else None


def _cause(change: Change) -> str:
    if change.state == State.FIXED and change.before:
        was = change.before.outcomes[change.case]
        return was.cause or was.reason
    return change.text


def _size(night: Night, case: str) -> tuple[int, float]:
    outcome = night.outcomes[case]
    return outcome.ranks, outcome.seconds


def culprit(one: Wanted, where: Where, before: Sequence[Culprit] = ()) -> Culprit:
    """before: what was found already, whose commits are tried first."""
    good, bad = one.commits
    empty = Culprit(one.cases, of_night(one.later), one.cause, good, bad, one.fixed)
    if problem := not_to_search(one, where):
        return dataclasses.replace(empty, problem=problem)
    where.tell(f"{one.cases[0]}: what {'fixed' if one.fixed else 'broke'} it, between {good} and {bad}?")
    try:
        found = _tried(one, where, before) or _search(one, where, good, bad)
    except (BisectError, *PROBLEMS) as error:
        others = _besides_commits(one)
        return dataclasses.replace(empty, problem=f"{error}{f'; also changed: {others}' if others else ''}")
    except Exception as error:  # one search's, for which no other need be given up
        return dataclasses.replace(empty, problem=unexpected(error))
    return _told(empty, found)


def not_to_search(one: Wanted, where: Where) -> str:
    """Why it is not begun; empty where it is."""
    good, bad = one.commits
    if not good or not bad:
        return "the commit of one of the two nights is not known"
    if good == bad:
        return f"both nights are of commit {good}; also changed: {_besides_commits(one)}"
    if dirty := [commit for commit in (good, bad) if commit.endswith("-dirty")]:
        return f"{dirty[0]}: sources were changed since the commit, it is not known to what"
    if where.repo is None:
        return "no repository of the trainer was named: --repo"
    if one.cases[0] not in where.cases:
        return f"{one.cases[0]} is not among the cases that are here"
    return "" if time.monotonic() < where.until else "time was up before it was begun"


def _besides_commits(one: Wanted) -> str:
    pairs = differs(one.good, one.bad)
    return differs_text({name: pair for name, pair in pairs.items() if name not in ("commit", "trainer")})


def _tried(one: Wanted, where: Where, before: Sequence[Culprit]) -> Found | None:
    """A commit that broke or fixed others between the same nights, if it is this one's too."""
    good, bad = one.commits
    known = [found for found in before if found.name and (found.good, found.bad, found.fixed) == (good, bad, one.fixed)]
    for pair in dict.fromkeys((found.before_commit, found.commit) for found in known):
        earlier, later = pair
        try:
            found = _search(one, where, *((later, earlier) if one.fixed else (earlier, later)))
        except BisectError:  # it is another's
            continue
        if found.first:
            return found
    return None


def _search(one: Wanted, where: Where, good: str, bad: str) -> Found:
    assert where.repo
    case = where.cases[one.cases[0]]
    return commits.bisect(where.repo, good, bad, [case], where.options, where.tell, until=where.until)


def _told(empty: Culprit, found: Found) -> Culprit:
    report = bisect_report(found)
    if found.fixed != empty.fixed:
        problem = "the later night is of an earlier commit, or of one on another branch"
        return dataclasses.replace(empty, problem=problem, report=report)
    if found.first and found.before:
        return dataclasses.replace(
            empty,
            name=found.first.name,
            commit=found.first.label,
            before=found.before.name,
            before_commit=found.before.label,
            report=report,
        )
    if found.unfinished:
        problem = f"time was up: {found.unfinished}, it is one of them"
    else:
        shown = ", ".join(found.candidates[:5])
        more = f" and {len(found.candidates) - 5} more" if len(found.candidates) > 5 else ""
        problem = f"commits that could not be judged hide it: {shown}{more}"
    return dataclasses.replace(empty, problem=problem, report=report)
