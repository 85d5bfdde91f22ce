"""Sentences on findings: where, what was expected, what was observed, and the bound."""

from __future__ import annotations

import math
import textwrap

from harness.core.evidence.text import bytes_text, ranks_text
from harness.core.judge.finding import Finding, Limit, Part, Value
from harness.core.judge.result import Result
from harness.core.plan.slices import slice_text
from harness.core.plan.traffic.flow import OUTSIDE

RELATIVE_UNITS = ("of the largest entry", "of its norm")
"""Units of distances from what is expected."""


def finding_text(finding: Finding, indent: str = "") -> str:
    """Return a finding as text: where, expected, observed, and the bound. Lines after the first are indented more."""
    first, *rest = finding_sentence(finding).splitlines()
    return "\n".join([indent + first, *(textwrap.indent(line, indent + "  ") for line in rest)])


MAX_SHOWN_FINDINGS = 8
"""Findings of a check that a report shows."""


def findings_text(result: Result, indent: str) -> list[str]:
    """Return the texts of MAX_SHOWN_FINDINGS findings of a check, indented, and a line with how many more there are.

    Those of the first step come first, as later ones mostly follow from them; within a step, as the check orders them.
    """
    by_step = sorted(result.findings, key=lambda finding: finding.step or 0)
    texts = [finding_text(finding, indent) for finding in by_step[:MAX_SHOWN_FINDINGS]]
    hidden = len(result.findings) - MAX_SHOWN_FINDINGS
    if hidden > 0:
        texts.append(f"{indent}and {hidden} more")
    return texts


def finding_sentence(finding: Finding) -> str:
    """Return "rank 1, step 2, gradient of norm.weight: expected .., observed .. (bound ..)".

    It is one line, unless what was observed has several.
    """
    if isinstance(finding.expected, float) and isinstance(finding.observed, float) and not finding.unit:
        expected, observed = _distinct_number_texts(finding.expected, finding.observed)
    else:
        expected = value_text(finding, finding.expected)
        observed = value_text(finding, finding.observed)
    text = f"{where_text(finding)}: expected {expected}, observed {observed}"
    bound = ""
    if finding.bound:
        bound = f"bound {finding.bound.number:.1e}"
        if finding.bound.how:
            bound += f": {finding.bound.how}"
    if remarks := "; ".join(filter(None, (finding.note, bound))):
        text += f" ({remarks})"
    return text


def _distinct_number_texts(expected: float, observed: float) -> tuple[str, str]:
    """Return two numbers with six digits, or with as many more as show three digits of their difference."""
    digits = 6
    if math.isfinite(expected) and math.isfinite(observed) and expected != observed:
        relative = abs(expected - observed) / max(abs(expected), abs(observed))
        digits = min(17, max(digits, 3 - math.floor(math.log10(relative))))
    return f"{expected:.{digits}g}", f"{observed:.{digits}g}"


def where_text(finding: Finding) -> str:
    """Return the place of a finding: "rank 1, step 2, gradient of norm.weight".

    The name of its check if it has no place.
    """
    step = "" if finding.step is None else f"step {finding.step}"
    places = (finding.launch, rank_list_text(finding.ranks), step, object_text(finding))
    return ", ".join(filter(None, places)) or finding.check


def rank_list_text(ranks: tuple[int, ...]) -> str:
    """Return "rank 1" or "ranks [0-3]"; empty for no ranks."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {ranks_text(ranks)}" if ranks else ""


def object_text(finding: Finding) -> str:
    """Return the object of a finding: "all_gather over dp_shard [0-3] in forward". Empty if it names none."""
    name = f"FSDP unit of {finding.name}" if finding.kind == "unit" and finding.name else finding.name
    if not finding.quantity or not name:
        subject = finding.quantity or name
    elif finding.kind == "collective":
        subject = f"{name} {finding.quantity}"
    else:
        subject = f"{finding.quantity} of {name}"
    group = ranks_text(finding.group) if finding.group not in ((), finding.ranks) else ""
    axis_and_group = " ".join(filter(None, (finding.axis, group)))
    text = " over ".join(filter(None, (subject, axis_and_group)))
    return " ".join(filter(None, (text, phase_text(finding.phase))))


def phase_text(phase: str) -> str:
    """Return a phase with its preposition: "in backward". A phase of several words, as "before forward", is not changed.

    Empty for no phase.
    """
    if phase == OUTSIDE:
        return "outside forward and backward"
    if not phase or " " in phase:
        return phase
    return f"in {phase}"


def value_text(finding: Finding, value: Value) -> str:
    """Return the text of an expected or observed value, in the finding's unit: "none" for None, "yes" or "no" for a
    bool."""
    match value:
        case None:
            return "none"
        case bool():
            return "yes" if value else "no"
        case Part():
            return slice_text(value.intervals, value.shape, flat=value.flat)
        case Limit():
            return _limit_text(finding, value)
        case tuple():
            return _tuple_text(finding, value)
        case int() | float():
            return number_with_unit(value, finding.unit)
    return str(value)


def _tuple_text(finding: Finding, values: tuple[Value, ...]) -> str:
    """Return the text of several values: a shape, ranks as "[0-3]", integers as a list with the unit, others joined by
    "and".

    "none" for an empty tuple.
    """
    if finding.unit == "shape":
        return f"shape {values}"
    if not values:
        return "none"
    if finding.unit == "ranks":
        return ranks_text([value for value in values if isinstance(value, int)])
    if all(type(value) is int for value in values):
        return f"{[*values]} {finding.unit}".strip()
    return " and ".join(value_text(finding, value) for value in values)


def number_with_unit(value: float, unit: str) -> str:
    """Return a number with its unit. Bytes of 1000 and more also have the exact number; 0 bytes are "nothing".

    A relative distance is "off by 1.00e-03 of its norm", or "NaN or infinite".
    """
    if unit == "bytes":
        if not value:
            return "nothing"
        exact = f" ({value:.16g})" if abs(value) >= 1000 else ""
        return f"{bytes_text(value)}{exact}"
    if unit in RELATIVE_UNITS and not math.isfinite(value):
        return "NaN or infinite"
    if unit in RELATIVE_UNITS:
        return f"off by {value:.2e} {unit}"
    return f"{value!r} {unit}".strip()


def _limit_text(finding: Finding, limit: Limit) -> str:
    """Return the text of a limit: "at least 1", "at most 2", or "1 to 2"."""
    least_text = None if limit.least is None else number_with_unit(limit.least, finding.unit)
    most_text = None if limit.most is None else number_with_unit(limit.most, finding.unit)
    if most_text is None:
        return f"at least {least_text}"
    if least_text is None:
        return f"at most {most_text}"
    return f"{least_text} to {most_text}"
