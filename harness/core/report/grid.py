"""Text on many cases: a row for each, a column for each check, then what went wrong."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from harness.core.checks import STAGES, all_checks
from harness.core.judge.result import Verdict
from harness.core.report.outcome import Outcome
from harness.core.report.repeats_text import repeats_text
from harness.core.report.text import MARKS, wrap_text


def matrix_report(outcomes: Sequence[Outcome], seconds: float | None) -> str:
    """Return the text on many cases: grid, checks that were not applicable, reports of cases that are not green, counts.

    seconds: duration of the run; None if unknown. There must be at least one outcome.
    """
    judged = [outcome for outcome in outcomes if outcome.checks]
    reports = [outcome.report for outcome in judged if outcome.report]
    notes = [not_applicable_text(judged), *replaced_parts_text(judged)] if judged else []
    parts = [grid_text(outcomes), *notes, *reports, counts_text(outcomes, seconds)]
    return "\n\n".join(parts)


def grid_text(outcomes: Sequence[Outcome]) -> str:
    """Return the grid: the legend, then a row for each case. Below a row are the names of the checks that do not pass.

    There must be at least one outcome.
    """
    width = max(len(outcome.case) for outcome in outcomes)
    stage_names = " ".join(f"{stage[: len(checks)]:<{len(checks)}}" for stage, checks in _checks_by_stage().items())
    lines = [*legend_lines(), "", f"{'':<{width}}  {stage_names}".rstrip()]
    for outcome in outcomes:
        lines += _row_lines(outcome, width)
    return "\n".join(lines)


def legend_lines() -> list[str]:
    """Return lines with the checks in the order of their columns, and the meaning of each letter."""
    width = max(map(len, STAGES))
    lines = ["a column a check, in this order:"]
    for stage, checks in _checks_by_stage().items():
        first, *rest = wrap_text(" ".join(checks), " " * (width + 4))
        lines += [f"  {stage:<{width}}  {first.strip()}", *rest]
    return [*lines, "P pass  F fail  ? could not be judged  - not applicable"]


def _checks_by_stage() -> dict[str, list[str]]:
    """Return the names of the checks by stage, in the order of all checks."""
    checks_by_stage: dict[str, list[str]] = {stage: [] for stage in STAGES}
    for name, module in all_checks().items():
        if module.STAGE in checks_by_stage:
            checks_by_stage[module.STAGE].append(name)
    return checks_by_stage


def _row_lines(outcome: Outcome, width: int) -> list[str]:
    """Return the row of a case: a letter for each check by stage, verdict, seconds; then lines on failing checks and
    reruns.

    A case without checks has its verdict and reason alone.
    """
    name = f"{outcome.case:<{width}}"
    if not outcome.checks:
        return [f"{name}  {outcome.verdict}: {outcome.reason}"]
    letters = {check: MARKS[Verdict(verdict)] for check, verdict in outcome.checks.items()}
    marks_by_stage = []
    for checks in _checks_by_stage().values():
        marks_by_stage.append("".join(letters.get(check, " ") for check in checks))
    row = f"{name}  {' '.join(marks_by_stage)}  {outcome.verdict:<7} {outcome.seconds:5.1f} s"
    lines = [row, *_failing_check_lines(outcome.checks)]
    for text in filter(None, [outcome.made_again, repeats_text(outcome.repeats)]):
        lines += wrap_text(text, "    ")
    return lines


def _failing_check_lines(verdicts: Mapping[str, str]) -> list[str]:
    """Return lines with the checks that fail; if there is none, those that could not be judged.

    Empty if there is neither.
    """
    for verdict in (Verdict.FAIL, Verdict.UNKNOWN):
        if checks := [check for check, check_verdict in verdicts.items() if check_verdict == verdict]:
            return wrap_text(f"{MARKS[verdict]} {' '.join(checks)}", "    ")
    return []


def replaced_parts_text(judged: Sequence[Outcome]) -> list[str]:
    """Return a list of one text: the trainer's parts that did not run as its users run them, with the number of cases
    of each.

    Empty if nothing was replaced. No verdict shows it.
    """
    cases_by_part: Counter[str] = Counter()
    for outcome in judged:
        cases_by_part.update(outcome.replaced)
    if not cases_by_part:
        return []
    lines = [f"  {count:3} x  {text}" for text, count in cases_by_part.items()]
    return ["\n".join(["replaced, so that it runs here:", *lines])]


def not_applicable_text(judged: Sequence[Outcome]) -> str:
    """Return a text on how many checks were judged, and which were not applicable, with reason and number of cases.

    Those examined nothing there. There must be at least one outcome.
    """
    cases_by_reason: Counter[tuple[str, str]] = Counter()
    for outcome in judged:
        cases_by_reason.update(outcome.not_applicable.items())
    counts = [len(outcome.checks) - len(outcome.not_applicable) for outcome in judged]
    judged_checks = f"{min(counts)} to {max(counts)}" if len(set(counts)) > 1 else str(counts[0])
    lines = [f"{judged_checks} of {len(all_checks())} checks were judged in a case; not applicable were:"]
    width = max((len(check) for check, _ in cases_by_reason), default=0)
    for (check, note), cases in sorted(cases_by_reason.items()):
        lines.append(f"  {check:<{width}}  {cases:>3} x  {note}")
    return "\n".join(lines)


def counts_text(outcomes: Sequence[Outcome], seconds: float | None) -> str:
    """Return the last line: number of cases, seconds where they are known, number of cases of each verdict."""
    counts = Counter(outcome.verdict for outcome in outcomes)
    verdicts = ", ".join(f"{count} {verdict}" for verdict, count in counts.items())
    time = f" in {seconds:.1f} s" if seconds is not None else ""
    plural = "s" if len(outcomes) > 1 else ""
    return f"{len(outcomes)} case{plural}{time}: {verdicts}"
