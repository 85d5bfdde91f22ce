"""Why cases are not green, each cause once with all its cases: what a page and a summary begin with."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from harness.judge.result import Verdict
from harness.report.outcome import Outcome


@dataclass(frozen=True)
class Shared:
    """text: the cause, or why there is no verdict. broken: whether a check is; else something could not be judged."""

    text: str
    cases: tuple[Outcome, ...]

    @property
    def broken(self) -> bool:
        return any(case.verdict == Verdict.FAIL for case in self.cases)


def causes(outcomes: Iterable[Outcome]) -> list[Shared]:
    """Of what failed: failing checks first, then those of most cases."""
    found: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        if outcome.failed:
            found.setdefault(why(outcome), []).append(outcome)
    shared = [Shared(text, tuple(cases)) for text, cases in found.items()]
    return sorted(shared, key=lambda one: (not one.broken, -len(one.cases)))


def why(outcome: Outcome) -> str:
    """In one line: the cause, or the reason."""
    return outcome.cause or outcome.reason or checks_text(outcome)


def checks_text(outcome: Outcome) -> str:
    """How many hold, and which do not."""
    verdicts = list(outcome.checks.values())
    parts = [f"{verdicts.count(Verdict.PASS)} of {len(verdicts)} hold"] if verdicts else []
    for verdict, word in ((Verdict.FAIL, "broken"), (Verdict.UNKNOWN, "could not be judged")):
        if named := [check for check, found in outcome.checks.items() if found == verdict]:
            parts.append(f"{word}: {' '.join(named)}")
    if without := verdicts.count(Verdict.NOT_APPLICABLE):
        parts.append(f"{without} not applicable")
    return "; ".join(parts)
