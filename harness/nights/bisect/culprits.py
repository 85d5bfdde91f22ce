"""Searches for what broke or fixed the cases of a night: one for each cause, since the last night without it.

Cases of one cause are searched for once, by the one of fewest ranks. Another cause of the same two nights is first tried on
the commits that were found for the others. That takes two runs, a search ten.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from harness.core.case.case import Case
from harness.core.run.matrix import CASE_PROBLEMS, unexpected_error_text
from harness.core.run.options import Options
from harness.nights.bisect import BisectError, commits
from harness.nights.bisect.search import PrintProgress, SearchResult
from harness.nights.bisect.side_by_side import bisect_report
from harness.nights.changes import Change, State, case_state, differences_text, night_differences
from harness.nights.history import Night
from harness.nights.history_text import SeriesChanges
from harness.nights.nights import Culprit, name_of_night


@dataclass(frozen=True)
class SearchSettings:
    """Everything that a search for culprits needs besides the cases to search for."""

    repo: Path | None  # a clone of the trainer; None if none is named
    cases: Mapping[str, Case]  # by name
    options: Options
    until: float  # by time.monotonic(), when no other commit is begun
    tell: PrintProgress


@dataclass(frozen=True)
class CulpritQuery:
    """A search to make: cases of one cause, and the two nights between which it begins."""

    cases: tuple[str, ...]  # the one of fewest ranks in front
    cause: str
    good: Night
    bad: Night
    fixed: bool  # the good night is the later one

    @property
    def later_night(self) -> Night:
        """Return the later one of the two nights."""
        return self.good if self.fixed else self.bad

    @property
    def good_and_bad_commit(self) -> tuple[str, str]:
        """Return the commits of the good night and of the bad one; an empty string where one was not recorded."""
        return self.good.recorded_value("commit"), self.bad.recorded_value("commit")


def find_culprits(series_changes: SeriesChanges, settings: SearchSettings) -> list[Culprit]:
    """Search for the commits that broke what is newly broken, then for those that fixed what is newly fixed.

    Return all results. A case that was never good is not searched for. A result without a commit says why in `problem`.
    """
    culprits: list[Culprit] = []
    for query in culprit_queries(series_changes):
        culprits.append(find_culprit(query, settings, culprits))
    return culprits


def culprit_queries(series_changes: SeriesChanges) -> list[CulpritQuery]:
    """Return one search for each cause and pair of nights: first for what is newly broken, then for what is fixed.

    Cases that were never good are left out.
    """
    cases_by_query: dict[tuple[str, bool, int, int], list[str]] = {}
    nights: dict[int, Night] = {}
    for change in [*series_changes.newly_broken, *series_changes.changes_to(State.FIXED)]:
        good_and_bad = _good_and_bad_night(change, series_changes.nights)
        if good_and_bad is not None:
            good, bad = good_and_bad
            nights |= {id(good): good, id(bad): bad}
            key = (_cause_of_change(change), change.state == State.FIXED, id(good), id(bad))
            cases_by_query.setdefault(key, []).append(change.case)
    queries: list[CulpritQuery] = []
    for (cause, fixed, good_id, bad_id), cases in cases_by_query.items():
        sizes = {case: _case_size(nights[bad_id], case) for case in cases}
        smallest_first = tuple(sorted(cases, key=sizes.__getitem__))
        queries.append(CulpritQuery(smallest_first, cause, nights[good_id], nights[bad_id], fixed))
    return queries


def _good_and_bad_night(change: Change, nights: Sequence[Night]) -> tuple[Night, Night] | None:
    """Return (good night, bad night) to search between: for a fixed case the later night is the good one.

    None if the case was never good before it broke.
    """
    if change.state == State.FIXED:
        return (change.now, change.before) if change.before else None
    earlier = nights[: next(index for index, night in enumerate(nights) if night is change.now)]
    good_nights = (night for night in reversed(earlier) if case_state(night.outcomes.get(change.case)) == "good")
    good = next(good_nights, None)
    return (good, change.now) if good else None


def _cause_of_change(change: Change) -> str:
    """Return the text of the change; for a fixed case the cause or reason of the failure before."""
    if change.state == State.FIXED and change.before:
        outcome_before = change.before.outcomes[change.case]
        return outcome_before.cause or outcome_before.reason
    return change.text


def _case_size(night: Night, case: str) -> tuple[int, float]:
    """Return a sort key by what a run of the case costs: (ranks, seconds)."""
    outcome = night.outcomes[case]
    return outcome.ranks, outcome.seconds


def find_culprit(query: CulpritQuery, settings: SearchSettings, earlier_culprits: Sequence[Culprit] = ()) -> Culprit:
    """Search for the commit that broke or fixed the query's cases. Return the culprit, with `problem` if none was found.

    earlier_culprits: results for other causes, whose commits are tried first. Never raises for a failed search.
    """
    good, bad = query.good_and_bad_commit
    open_culprit = Culprit(query.cases, name_of_night(query.later_night), query.cause, good, bad, query.fixed)
    if problem := reason_not_to_search(query, settings):
        return dataclasses.replace(open_culprit, problem=problem)
    settings.tell(f"{query.cases[0]}: what {'fixed' if query.fixed else 'broke'} it, between {good} and {bad}?")
    try:
        search_result = _search_known_culprits(query, settings, earlier_culprits) or _search_commits(
            query, settings, good, bad
        )
    except (BisectError, *CASE_PROBLEMS) as error:
        problem = str(error)
        if other_changes := _other_differences(query):
            problem += f"; also changed: {other_changes}"
        return dataclasses.replace(open_culprit, problem=problem)
    except Exception as error:  # one search's, for which no other need be given up
        return dataclasses.replace(open_culprit, problem=unexpected_error_text(error))
    return _with_search_result(open_culprit, search_result)


def reason_not_to_search(query: CulpritQuery, settings: SearchSettings) -> str:
    """Return why no search is possible: no two known and clean commits, no repository, no such case, no time.

    Empty if it is.
    """
    good, bad = query.good_and_bad_commit
    if not good or not bad:
        return "the commit of one of the two nights is not known"
    if good == bad:
        return f"both nights are of commit {good}; also changed: {_other_differences(query)}"
    if dirty_commits := [commit for commit in (good, bad) if commit.endswith("-dirty")]:
        return f"{dirty_commits[0]}: sources were changed since the commit, it is not known to what"
    if settings.repo is None:
        return "no repository of the trainer was named: --repo"
    if query.cases[0] not in settings.cases:
        return f"{query.cases[0]} is not among the cases that are here"
    return "" if time.monotonic() < settings.until else "time was up before it was begun"


def _other_differences(query: CulpritQuery) -> str:
    """Return one line on what differs between the two nights besides commit and trainer, or "nothing that is recorded"."""
    pairs = night_differences(query.good, query.bad)
    return differences_text({name: pair for name, pair in pairs.items() if name not in ("commit", "trainer")})


def _search_known_culprits(
    query: CulpritQuery, settings: SearchSettings, earlier_culprits: Sequence[Culprit]
) -> SearchResult | None:
    """Try the commits that broke or fixed other cases between the same nights. Return the result for the first that fits.

    None if none of them does.
    """
    good, bad = query.good_and_bad_commit
    known_culprits = [
        culprit
        for culprit in earlier_culprits
        if culprit.name and (culprit.good, culprit.bad, culprit.fixed) == (good, bad, query.fixed)
    ]
    for before, commit in dict.fromkeys((culprit.before_commit, culprit.commit) for culprit in known_culprits):
        try:
            if query.fixed:
                search_result = _search_commits(query, settings, commit, before)
            else:
                search_result = _search_commits(query, settings, before, commit)
        except BisectError:  # it is another's
            continue
        if search_result.first:
            return search_result
    return None


def _search_commits(query: CulpritQuery, settings: SearchSettings, good: str, bad: str) -> SearchResult:
    """Return the result of a bisection between two commits, by the query's case of fewest ranks. Raises BisectError.

    Needs settings.repo.
    """
    assert settings.repo
    case = settings.cases[query.cases[0]]
    return commits.bisect_commits(
        settings.repo, good, bad, [case], settings.options, settings.tell, until=settings.until
    )


def _with_search_result(open_culprit: Culprit, search_result: SearchResult) -> Culprit:
    """Return the culprit with the commit that the search found and its report, or with `problem`: why it found none."""
    report = bisect_report(search_result)
    if search_result.fixed != open_culprit.fixed:
        problem = "the later night is of an earlier commit, or of one on another branch"
        return dataclasses.replace(open_culprit, problem=problem, report=report)
    if search_result.first and search_result.before:
        return dataclasses.replace(
            open_culprit,
            name=search_result.first.name,
            commit=search_result.first.label,
            before=search_result.before.name,
            before_commit=search_result.before.label,
            report=report,
        )
    if search_result.unfinished:
        problem = f"time was up: {search_result.unfinished}, it is one of them"
    else:
        shown = ", ".join(search_result.candidates[:5])
        rest_text = f" and {len(search_result.candidates) - 5} more" if len(search_result.candidates) > 5 else ""
        problem = f"commits that could not be judged hide it: {shown}{rest_text}"
    return dataclasses.replace(open_culprit, problem=problem, report=report)
