"""`harness faults` as a person reads it: the list, first lines, and how many bugs each method notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.faults import FAMILIES, Fault
from harness.faults.attempt import METHODS, Attempt, Outcome


def listing(faults: Sequence[Fault], accepted: Sequence[Attempt]) -> str:
    """List, by kind of bug: name, case, what breaks, modelled on what; below, the first line it was last accepted with."""
    named = {attempt.fault: attempt.cause for attempt in accepted}
    width = {key: max(len(getattr(fault, key)) for fault in faults) for key in ("name", "case")}
    lines = []
    for family in [*FAMILIES.values(), ""]:
        some = [fault for fault in faults if fault.family == family]
        lines += [family or "others"] if some else []
        for f in some:
            lines.append(f"  {f.name:<{width['name']}}  {f.case:<{width['case']}}  {f.breaks} [{f.bug}]")
            lines += [f"    -> {named[f.name]}"] if f.name in named else []
    return "\n".join(lines)


def report(done: Sequence[Attempt], control: Attempt | None, seconds: float) -> str:
    """All first lines in one list, the table of methods, once more what is not as expected, and one line that counts."""
    counts = Counter(attempt.outcome for attempt in done)
    said = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    lines = [f"{len(done)} fault{'s' * (len(done) != 1)} in {seconds:.1f} s: {said}"]
    if control:
        right = control.outcome is Outcome.MISSED
        text = f"{control.outcome}, as it must be" if right else f"{control.outcome}, it must be MISSED: {control.note}"
        lines.append(f"control, which changes nothing: {text}")
    parts = [
        first_lines(done),
        table(done) if any(attempt.real and attempt.weaker for attempt in done) else "",
        _not_caught(done),
        "\n".join(lines),
    ]
    return "\n\n".join(filter(None, parts))


def _not_caught(done: Sequence[Attempt]) -> str:
    """Repeat what is not caught at the end, where a log that was cut still has it."""
    odd = [attempt for attempt in done if attempt.outcome is not Outcome.CAUGHT]
    return first_lines(odd) if odd and len(odd) < len(done) else ""


def first_lines(done: Sequence[Attempt]) -> str:
    """A row a fault: outcome, which weaker tests notice it, name, case, the diagnosis' first line."""
    width = {key: max(len(getattr(a, key)) for a in done) for key in ("fault", "case", "outcome")}
    letters = dict(zip(METHODS, "abcd", strict=True))
    legend = "noticed by: " + ", ".join(f"{letters[key]} {text}" for key, text in METHODS.items())
    rows = []
    for a in done:
        noticed = "".join(letters[key] if (a.weaker or {}).get(key) else "-" for key in METHODS) if a.weaker else "    "
        rows.append(
            f"{a.outcome:<{width['outcome']}}  {noticed}  {a.fault:<{width['fault']}}  {a.case:<{width['case']}}  {a.cause}"
        )
        rows += [f"{'':<{width['outcome']}}        {a.note}"] if a.note and a.outcome is not Outcome.CAUGHT else []
    return "\n".join([legend, *rows] if any(a.weaker for a in done) else rows)


def table(done: Sequence[Attempt]) -> str:
    """How many of the bugs each method notices. Faults of a family, modelled on no single bug, do not count here."""
    real = [attempt for attempt in done if attempt.real and attempt.weaker]
    rows = [(text, sum((attempt.weaker or {})[key] for attempt in real)) for key, text in METHODS.items()]
    caught = [attempt for attempt in real if attempt.outcome is Outcome.CAUGHT]
    named = [attempt for attempt in caught if "not explained" not in attempt.kinds]
    rows += [("this harness", len(caught)), ("this harness, cause named and not only located", len(named))]
    lines = [f"| of {len(real)} real bugs, re-created | notices |", "|---|---|"]
    return "\n".join(lines + [f"| {text} | {count} |" for text, count in rows])
