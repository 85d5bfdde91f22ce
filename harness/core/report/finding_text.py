"""Findings in words."""

from __future__ import annotations

import math
import textwrap

from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.finding import Finding, Limit, Part, Value
from harness.core.judge.result import Result
from harness.core.plan.slices import slice_text
from harness.core.plan.traffic.flow import OUTSIDE

RELATIVE = ("of the largest entry", "of its norm")
"""Units of distances from what is expected."""


def finding_text(finding: Finding, indent: str = "") -> str:
    """Return where, expected, observed, and the bound; lines after the first are indented more."""
    first, *rest = sentence(finding).splitlines()
    return "\n".join([indent + first, *(textwrap.indent(line, indent + "  ") for line in rest)])


SHOWN = 8
"""Findings of a check that a report shows."""


def findings_text(result: Result, indent: str) -> list[str]:
    """Return the first findings of a check, and how many more there are."""
    more = len(result.findings) - SHOWN
    return [finding_text(one, indent) for one in result.findings[:SHOWN]] + [f"{indent}and {more} more"] * (more > 0)


def sentence(finding: Finding) -> str:
    """Return the finding on one line, unless what was observed has several."""
    how = f": {finding.bound.how}" if finding.bound and finding.bound.how else ""
    bound = f"bound {finding.bound.number:.1e}{how}" if finding.bound else ""
    besides = "; ".join(filter(None, (finding.note, bound)))
    seen = f"expected {value_text(finding, finding.expected)}, observed {value_text(finding, finding.observed)}"
    return f"{where_text(finding)}: {seen}" + f" ({besides})" * bool(besides)


def where_text(finding: Finding) -> str:
    """Return the place: "rank 1, step 2, gradient of norm.weight"."""
    step = "" if finding.step is None else f"step {finding.step}"
    places = (finding.launch, of_ranks(finding.ranks), step, object_text(finding))
    return ", ".join(filter(None, places)) or finding.check


def of_ranks(ranks: tuple[int, ...]) -> str:
    """Return "rank 1" or "ranks [0-3]"."""
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {ranks_text(ranks)}" if ranks else ""


def object_text(finding: Finding) -> str:
    """Return what it is about: "all_gather over dp_shard [0-3] in forward"."""
    name = f"FSDP unit of {finding.name}" if finding.kind == "unit" and finding.name else finding.name
    both = f"{name} {finding.quantity}" if finding.kind == "collective" else f"{finding.quantity} of {name}"
    what = both if finding.quantity and name else finding.quantity or name
    over = " ".join(
        filter(None, (finding.axis, ranks_text(finding.group) if finding.group not in ((), finding.ranks) else ""))
    )
    joined = f"{what} over {over}" if what and over else what or over
    return " ".join(filter(None, (joined, when_text(finding.phase))))


def when_text(phase: str) -> str:
    """Return "in backward"; "before forward" is not changed."""
    if phase == OUTSIDE:
        return "outside forward and backward"
    return phase if " " in phase else f"in {phase}" * bool(phase)


def value_text(finding: Finding, value: Value) -> str:
    """Return what is expected or observed, in the finding's unit."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case Part():
            return slice_text(value.intervals, value.shape, flat=value.flat)
        case Limit():
            return _limit(finding, value)
        case tuple():
            return _several(finding, value)
        case int() | float():
            return number(value, finding.unit)
    return str(value)


def _several(finding: Finding, values: tuple[Value, ...]) -> str:
    if finding.unit == "shape":
        return f"shape {values}"
    if not values:
        return "none"
    if finding.unit == "ranks":
        return ranks_text([one for one in values if isinstance(one, int)])
    if all(type(one) is int for one in values):
        return f"{[*values]} {finding.unit}".strip()
    return " and ".join(value_text(finding, one) for one in values)


def number(value: float, unit: str) -> str:
    """Return a number with its unit; bytes also have the exact number."""
    if unit == "bytes":
        exact = f" ({value:.16g})" * (abs(value) >= 1000)
        return f"{bytes_text(value)}{exact}" if value else "nothing"
    if unit in RELATIVE and not math.isfinite(value):
        return "NaN or infinite"
    if unit in RELATIVE:
        return f"off by {value:.2e} {unit}"
    return f"{value!r} {unit}".strip()


def _limit(finding: Finding, limit: Limit) -> str:
    least, most = (None if one is None else number(one, finding.unit) for one in (limit.least, limit.most))
    if least is None or most is None:
        return f"at least {least}" if most is None else f"at most {most}"
    return f"{least} to {most}"
