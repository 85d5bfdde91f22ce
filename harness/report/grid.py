"""Many cases on one page: a row for each, a column for each law, then what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.checks import all_checks
from harness.judge.judgement import Judgement
from harness.judge.result import Verdict
from harness.report.text import MARKS, case_report
from harness.spec.case import Case


@dataclass(frozen=True)
class Outcome:
    """What became of one case: judged; or skipped, with the reason; or a problem kept it from being judged."""

    case: Case
    seconds: float
    judgement: Judgement | None = None
    skipped: str = ""
    problem: str = ""

    @property
    def verdict(self) -> str:
        if self.judgement:
            return str(self.judgement.verdict)
        return "SKIPPED" if self.skipped else "ERROR"


def matrix_report(outcomes: Sequence[Outcome], seconds: float) -> str:
    """The grid, why laws were not applicable, the report of every case that is not green, and one line that counts."""
    judged = [outcome.judgement for outcome in outcomes if outcome.judgement]
    reports = [case_report(judgement) for judgement in judged if judgement.verdict not in (Verdict.PASS, Verdict.XFAIL)]
    told = [not_applicable(judged), *replaced(judged)] if judged else []
    parts = [grid(outcomes), *told, *reports, summary(outcomes, seconds)]
    return "\n\n".join(parts)


def grid(outcomes: Sequence[Outcome]) -> str:
    width = max(len(outcome.case.name) for outcome in outcomes)
    checks = list(all_checks())
    header = [" " * (width + 2) + "| " * column + check for column, check in enumerate(checks)]
    legend = (
        " ".join([" " * (width + 1), *("|" for _ in checks)])
        + "  P pass  F fail  ? could not be judged  - not applicable"
    )
    return "\n".join([*header, legend, *(f"{outcome.case.name:<{width}}  {_row(outcome)}" for outcome in outcomes)])


def _row(outcome: Outcome) -> str:
    if outcome.judgement is None:
        return f"{outcome.verdict}: {outcome.skipped or outcome.problem}"
    marks = " ".join(MARKS[result.verdict] for result in outcome.judgement.results)
    return f"{marks}  {outcome.verdict:<7} {outcome.seconds:5.1f} s"


def replaced(judged: Sequence[Judgement]) -> list[str]:
    """What of the trainer did not run as its users run it, and in how many cases: of that no verdict tells."""
    parts = Counter(text for one in judged for text in one.replaced)
    lines = [f"  {count:3} x  {text}" for text, count in parts.items()]
    return ["\n".join(["replaced, so that it runs here:", *lines])] if lines else []


def not_applicable(judged: Sequence[Judgement]) -> str:
    """Which laws had nothing to say, for what reason and in how many cases: what is green by them was not looked at."""
    silent = Verdict.NOT_APPLICABLE
    reasons = Counter((r.check, r.note) for one in judged for r in one.results if r.verdict is silent)
    shares = [sum(r.verdict is not silent for r in one.results) for one in judged]
    found = f"{min(shares)} to {max(shares)}" if len(set(shares)) > 1 else str(shares[0])
    lines = [f"{found} of {len(all_checks())} laws were judged in a case; not applicable were:"]
    width = max((len(check) for check, _ in reasons), default=0)
    return "\n".join(
        lines + [f"  {check:<{width}}  {count:>3} x  {note}" for (check, note), count in sorted(reasons.items())]
    )


def summary(outcomes: Sequence[Outcome], seconds: float) -> str:
    counts = Counter(outcome.verdict for outcome in outcomes)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    return f"{len(outcomes)} case{'s' * (len(outcomes) > 1)} in {seconds:.1f} s: {said}"
