"""The causes of cases that are not green, each once with all its cases. A page and a summary begin with them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.judge.result import Verdict
from harness.core.report.outcome import Outcome

RANKS = re.compile(r"\[[\d,.\- ]+\]( (\.\. )?\[[\d,.\- ]+\])*")
NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*(e[+-]?\d+)?")


@dataclass(frozen=True)
class SharedCause:
    """One cause, with one or more cases that have it."""

    text: str
    """The cause in the smallest case, or why that case has no verdict."""
    cases: tuple[Outcome, ...]
    """The cases with failing checks first, and of these the one with the fewest ranks."""

    @property
    def broken(self) -> bool:
        """Return whether a check fails in some case; else something could not be judged."""
        return any(case.verdict == Verdict.FAIL for case in self.cases)


def shared_causes(outcomes: Iterable[Outcome]) -> list[SharedCause]:
    """Return the causes of outcomes that failed: those with failing checks first, then those of most cases.

    Causes that differ in numbers and ranks alone are one. Empty if all outcomes are green or skipped.
    """
    cases_by_cause: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.failed:
            cases_by_cause.setdefault(_without_numbers(cause_or_reason(outcome)), []).append(outcome)
    shared = []
    for cases in cases_by_cause.values():
        smallest_first = sorted(cases, key=_failing_and_small_first)
        shared.append(SharedCause(cause_or_reason(smallest_first[0]), tuple(smallest_first)))
    return sorted(shared, key=lambda cause: (not cause.broken, -len(cause.cases)))


def _failing_and_small_first(outcome: Outcome) -> tuple[bool, int]:
    """Return a sort key: cases with failing checks first, then by number of ranks."""
    return outcome.verdict != Verdict.FAIL, outcome.ranks


def _without_numbers(cause: str) -> str:
    """Return the cause without its numbers and ranks: the same text for one mistake in layouts of different degrees."""
    return NUMBER.sub("#", RANKS.sub("[#]", cause))


def cause_or_reason(outcome: Outcome) -> str:
    """Return the cause of a case's verdict in one line: its cause, else its reason, else the verdicts of its checks."""
    return outcome.cause or outcome.reason or checks_text(outcome)


def checks_text(outcome: Outcome) -> str:
    """Return "21 of 25 pass; fail: traffic memory; 2 not applicable", a text on the checks of a case.

    Empty if none were judged.
    """
    verdicts = list(outcome.checks.values())
    parts = [f"{verdicts.count(Verdict.PASS)} of {len(verdicts)} pass"] if verdicts else []
    for verdict, word in ((Verdict.FAIL, "fail"), (Verdict.UNKNOWN, "could not be judged")):
        if named := [check for check, check_verdict in outcome.checks.items() if check_verdict == verdict]:
            parts.append(f"{word}: {' '.join(named)}")
    if without := verdicts.count(Verdict.NOT_APPLICABLE):
        parts.append(f"{without} not applicable")
    return "; ".join(parts)
