"""Many cases on one page: a row for each, a column for each check, then what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.core.checks import STAGES, all_checks
from harness.core.judge.result import Verdict
from harness.core.report.outcome import Outcome
from harness.core.report.repeats_text import repeats_text
from harness.core.report.text import MARKS, wrapped


def matrix_report(outcomes: Sequence[Outcome], seconds: float | None) -> str:
    """The grid, why checks were not applicable, the report of every case that is not green, and one line that counts."""
    judged = [outcome for outcome in outcomes if outcome.checks]
    reports = [outcome.report for outcome in judged if outcome.report]
    notes = [not_applicable(judged), *replaced(judged)] if judged else []
    parts = [grid(outcomes), *notes, *reports, summary(outcomes, seconds)]
    return "\n\n".join(parts)


def grid(outcomes: Sequence[Outcome]) -> str:
    """Which check each column is of, then a row a case; below a row the checks that do not pass, by name."""
    width = max(len(outcome.case) for outcome in outcomes)
    groups = " ".join(f"{stage[: len(checks)]:<{len(checks)}}" for stage, checks in _stages().items())
    rows = [line for outcome in outcomes for line in _rows(outcome, width)]
    return "\n".join([*legend(), "", f"{'':<{width}}  {groups}".rstrip(), *rows])


def legend() -> list[str]:
    """The checks in the order of their columns, and what a letter says."""
    width = max(map(len, STAGES))
    lines = ["a column a check, in this order:"]
    for stage, checks in _stages().items():
        first, *rest = wrapped(" ".join(checks), " " * (width + 4))
        lines += [f"  {stage:<{width}}  {first.strip()}", *rest]
    return [*lines, "P pass  F fail  ? could not be judged  - not applicable"]


def _stages() -> dict[str, list[str]]:
    """The names of the checks by stage; their order is that of all checks."""
    checks = all_checks().items()
    return {stage: [name for name, module in checks if stage == module.STAGE] for stage in STAGES}


def _rows(outcome: Outcome, width: int) -> list[str]:
    name = f"{outcome.case:<{width}}"
    if not outcome.checks:
        return [f"{name}  {outcome.verdict}: {outcome.reason}"]
    letters = {check: MARKS[Verdict(verdict)] for check, verdict in outcome.checks.items()}
    marks = " ".join("".join(letters.get(check, " ") for check in checks) for checks in _stages().values())
    row = f"{name}  {marks}  {outcome.verdict:<7} {outcome.seconds:5.1f} s"
    told = filter(None, [outcome.made_again, repeats_text(outcome.repeats)])
    return [row, *_not_held(outcome.checks), *(line for text in told for line in wrapped(text, "    "))]


def _not_held(verdicts: Mapping[str, str]) -> list[str]:
    """The checks that fail; where none is, those that could not be judged."""
    for verdict in (Verdict.FAIL, Verdict.UNKNOWN):
        if checks := [check for check, found in verdicts.items() if found == verdict]:
            return wrapped(f"{MARKS[verdict]} {' '.join(checks)}", "    ")
    return []


def replaced(judged: Sequence[Outcome]) -> list[str]:
    """What of the trainer did not run as its users run it, and in how many cases: no verdict says so."""
    parts = Counter(text for one in judged for text in one.replaced)
    lines = [f"  {count:3} x  {text}" for text, count in parts.items()]
    return ["\n".join(["replaced, so that it runs here:", *lines])] if lines else []


def not_applicable(judged: Sequence[Outcome]) -> str:
    """Which checks had nothing to say, for what reason and in how many cases: what is green by them was not looked at."""
    reasons = Counter(pair for one in judged for pair in one.not_applicable.items())
    shares = [len(one.checks) - len(one.not_applicable) for one in judged]
    found = f"{min(shares)} to {max(shares)}" if len(set(shares)) > 1 else str(shares[0])
    lines = [f"{found} of {len(all_checks())} checks were judged in a case; not applicable were:"]
    width = max((len(check) for check, _ in reasons), default=0)
    return "\n".join(
        lines + [f"  {check:<{width}}  {count:>3} x  {note}" for (check, note), count in sorted(reasons.items())]
    )


def summary(outcomes: Sequence[Outcome], seconds: float | None) -> str:
    """The last line: how many cases, how long where that is known, how many of each verdict."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    time = f" in {seconds:.1f} s" if seconds is not None else ""
    return f"{len(outcomes)} case{'s' * (len(outcomes) > 1)}{time}: {said}"
