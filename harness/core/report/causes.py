"""Why cases are not green, each cause once with all its cases: what a page and a summary begin with."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.judge.result import Verdict
from harness.core.report.outcome import Outcome

RANKS = re.compile(r"\[[\d,.\- ]+\]( (\.\. )?\[[\d,.\- ]+\])*")
NUMBER = re.compile(r"(?<![\w.])\d[\d,.]*(e[+-]?\d+)?")


@dataclass(frozen=True)
class Shared:
    """One cause of one or more cases."""

    text: str
    """The cause in the smallest case, or why that case has no verdict."""
    cases: tuple[Outcome, ...]
    """The cases with failing checks first, and of these the one with the fewest ranks."""

    @property
    def broken(self) -> bool:
        """Whether a check fails; else something could not be judged."""
        return any(case.verdict == Verdict.FAIL for case in self.cases)


def causes(outcomes: Iterable[Outcome]) -> list[Shared]:
    """Return the causes of what failed: failing checks first, then those of most cases."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.failed:
            found.setdefault(_without_numbers(why(outcome)), []).append(outcome)
    ordered = [sorted(cases, key=_size) for cases in found.values()]
    shared = [Shared(why(cases[0]), tuple(cases)) for cases in ordered]
    return sorted(shared, key=lambda one: (not one.broken, -len(one.cases)))


def _size(outcome: Outcome) -> tuple[bool, int]:
    return outcome.verdict != Verdict.FAIL, outcome.ranks


def _without_numbers(cause: str) -> str:
    """Return the same text for one mistake in layouts of different degrees."""
    return NUMBER.sub("#", RANKS.sub("[#]", cause))


def why(outcome: Outcome) -> str:
    """Return the cause, or the reason, in one line."""
    return outcome.cause or outcome.reason or checks_text(outcome)


def checks_text(outcome: Outcome) -> str:
    """Return how many checks pass, and which do not."""
    verdicts = list(outcome.checks.values())
    parts = [f"{verdicts.count(Verdict.PASS)} of {len(verdicts)} pass"] if verdicts else []
    for verdict, word in ((Verdict.FAIL, "fail"), (Verdict.UNKNOWN, "could not be judged")):
        if named := [check for check, found in outcome.checks.items() if found == verdict]:
            parts.append(f"{word}: {' '.join(named)}")
    if without := verdicts.count(Verdict.NOT_APPLICABLE):
        parts.append(f"{without} not applicable")
    return "; ".join(parts)
