"""Two runs of a matrix: which verdicts, checks and structure of which cases are others, though every check may pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from harness.core.report.text import wrapped
from harness.recording.judged.figures import TIME, Shift
from harness.recording.judged.structure import Difference
from harness.recording.pages.compared import counted, listed, shifted

Costs = Mapping[str, float]


@dataclass(frozen=True)
class ComparedCase:
    """A case in two runs."""

    case: str
    found: tuple[Difference, ...]  # what differs
    costs: tuple[Costs, Costs] = field(default=({}, {}))  # of both runs
    figures: tuple[Shift, ...] = ()  # figures that differ
    problem: str = ""  # why only verdicts and sums of bytes were compared


def compared_runs(
    one: str, other: str, of: Sequence[tuple[str, str, str]], cases: Sequence[ComparedCase], *, on_gpus: bool
) -> list[str]:
    """of: what the runs themselves differ in, (name, one, other). on_gpus: both of them."""
    differ = [each for each in cases if each.found]
    lines = [f"{one} -> {other}: {len(cases)} case{'s' * (len(cases) != 1)}, {len(differ) or 'none'} of them differ"]
    lines += [line for name, was, now in of for line in wrapped(f"{name}: {was} -> {now}", "  ", "    ")]
    for found, names in _alike(differ).items():
        lines += ["", *wrapped(f"{', '.join(names)}: {counted(found)}", "", "  "), *listed(found)]
    problems: dict[str, list[str]] = {}
    for each in cases:
        if each.problem:
            problems.setdefault(each.problem, []).append(each.case)
    for problem, names in problems.items():
        lines += ["", *wrapped(f"structure not compared: {problem}: {', '.join(names)}", "", "  ")]
    return [*lines, *_moved(cases, on_gpus=on_gpus)]


def _alike(cases: Sequence[ComparedCase]) -> dict[tuple[Difference, ...], list[str]]:
    """Group cases that differ alike, to print their differences once."""
    found: dict[tuple[Difference, ...], list[str]] = {}
    for each in cases:
        found.setdefault(each.found, []).append(each.case)
    return found


def _moved(cases: Sequence[ComparedCase], *, on_gpus: bool) -> list[str]:
    """Return the table of all cases. A case with other verdicts or structure comes with its figures like the others."""
    found = [(each.case, shift) for each in cases for shift in each.figures]
    found.sort(key=lambda one: one[1].order)
    timed = any(shift.unit == TIME for _, shift in found)
    return shifted(found, "on CPU seconds measure no speed" if timed and not on_gpus else "")
