"""The page of two runs of a matrix: the cases whose verdicts, checks or structure differ, though every check may pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.core.report.text import wrap_text
from harness.recording.judged.figures import TIME, Shift
from harness.recording.judged.structure import Difference
from harness.recording.pages.compared import difference_count_text, difference_lines, shift_lines

Costs = Mapping[str, float]


@dataclass(frozen=True)
class ComparedCase:
    """The comparison of one case in two runs."""

    case: str
    found: tuple[Difference, ...]  # what differs
    costs: tuple[Costs, Costs] = field(default=({}, {}))  # of both runs
    figures: tuple[Shift, ...] = ()  # figures that differ
    problem: str = ""  # why only verdicts and sums of bytes were compared


def lines_on_two_runs(
    first: str,
    second: str,
    run_differences: Sequence[tuple[str, str, str]],
    cases: Sequence[ComparedCase],
    *,
    on_gpus: bool,
) -> list[str]:
    """Return the lines of text on two runs: what the runs, their cases and their figures differ in.

    first, second: names of the runs. run_differences: (name, value of the first, of the second) each. Cases with equal
    differences are printed together. on_gpus: both runs were on GPUs; else a note says that seconds measure no speed.
    """
    differing_cases = [case for case in cases if case.found]
    count = "1 case" if len(cases) == 1 else f"{len(cases)} cases"
    lines = [f"{first} -> {second}: {count}, {len(differing_cases) or 'none'} of them differ"]
    for name, was, now in run_differences:
        lines += wrap_text(f"{name}: {was} -> {now}", "  ", "    ")
    for differences, names in _names_by_differences(differing_cases).items():
        lines += [
            "",
            *wrap_text(f"{', '.join(names)}: {difference_count_text(differences)}", "", "  "),
            *difference_lines(differences),
        ]
    problems: dict[str, list[str]] = {}
    for case in cases:
        if case.problem:
            problems.setdefault(case.problem, []).append(case.case)
    for problem, names in problems.items():
        lines += ["", *wrap_text(f"structure not compared: {problem}: {', '.join(names)}", "", "  ")]
    return [*lines, *_figures_table(cases, on_gpus=on_gpus)]


def _names_by_differences(cases: Sequence[ComparedCase]) -> dict[tuple[Difference, ...], list[str]]:
    """Return, by their differences, the names of the cases that have just these: each set of differences is printed once."""
    names_by_differences: dict[tuple[Difference, ...], list[str]] = {}
    for case in cases:
        names_by_differences.setdefault(case.found, []).append(case.case)
    return names_by_differences


def _figures_table(cases: Sequence[ComparedCase], *, on_gpus: bool) -> list[str]:
    """Return the lines of the table of all cases' changed figures, in the order of the figures. Empty if no figure changed."""
    rows: list[tuple[str, Shift]] = []
    for case in cases:
        rows += [(case.case, shift) for shift in case.figures]
    rows.sort(key=lambda row: row[1].order)
    timed = any(shift.unit == TIME for _, shift in rows)
    return shift_lines(rows, "on CPU seconds measure no speed" if timed and not on_gpus else "")
