"""The text of `harness faults`: the list of faults, results of trying them, and how many bugs each method notices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from harness.faults import FAMILIES, Fault
from harness.faults.attempt import METHODS, Attempt, Outcome


def faults_text(faults: Sequence[Fault], accepted: Sequence[Attempt]) -> str:
    """Return the list of faults by kind of bug: name, case, what breaks, what it is modelled on. Needs one fault or more.

    Below each fault is the cause that it was last accepted with, if it was.
    """
    causes = {attempt.fault: attempt.cause for attempt in accepted}
    name_width = max(len(fault.name) for fault in faults)
    case_width = max(len(fault.case) for fault in faults)
    lines = []
    for family in [*FAMILIES.values(), ""]:
        faults_of_family = [fault for fault in faults if fault.family == family]
        if faults_of_family:
            lines.append(family or "others")
        for fault in faults_of_family:
            lines.append(f"  {fault.name:<{name_width}}  {fault.case:<{case_width}}  {fault.breaks} [{fault.bug}]")
            if fault.name in causes:
                lines.append(f"    -> {causes[fault.name]}")
    return "\n".join(lines)


def report_text(done: Sequence[Attempt], control: Attempt | None, seconds: float) -> str:
    """Return the report on attempts: a row for each, the table of methods, rows of what is not caught, and counts.

    The table is left out if no real bug was compared with weaker tests. control: its attempt, which must be MISSED;
    None leaves it out.
    """
    counts = Counter(attempt.outcome for attempt in done)
    counts_text = ", ".join(f"{count} {outcome}" for outcome, count in counts.items())
    noun = "fault" if len(done) == 1 else "faults"
    lines = [f"{len(done)} {noun} in {seconds:.1f} s: {counts_text}"]
    if control:
        is_right = control.outcome is Outcome.MISSED
        text = (
            f"{control.outcome}, as it must be" if is_right else f"{control.outcome}, it must be MISSED: {control.note}"
        )
        lines.append(f"control, which changes nothing: {text}")
    parts = [
        attempt_rows(done),
        methods_table(done) if any(attempt.real and attempt.weaker for attempt in done) else "",
        _uncaught_rows(done),
        "\n".join(lines),
    ]
    return "\n\n".join(filter(None, parts))


def _uncaught_rows(done: Sequence[Attempt]) -> str:
    """Return the rows of faults that are not caught, to be repeated at the end. Empty if all are caught, or none.

    A log that was cut still has its end.
    """
    uncaught = [attempt for attempt in done if attempt.outcome is not Outcome.CAUGHT]
    return attempt_rows(uncaught) if uncaught and len(uncaught) < len(done) else ""


def attempt_rows(done: Sequence[Attempt]) -> str:
    """Return one row for each attempt: outcome, weaker tests that notice it as letters, name, case, cause.

    Needs one attempt or more. A fault that is not caught has a second row with its note. If weaker tests were measured,
    a legend comes first.
    """
    fault_width = max(len(attempt.fault) for attempt in done)
    case_width = max(len(attempt.case) for attempt in done)
    outcome_width = max(len(attempt.outcome) for attempt in done)
    letters = dict(zip(METHODS, "abcd", strict=True))
    legend = "noticed by: " + ", ".join(f"{letters[key]} {text}" for key, text in METHODS.items())
    rows = []
    for attempt in done:
        noticed = "    "
        if attempt.weaker:
            noticed = "".join(letters[key] if attempt.weaker.get(key) else "-" for key in METHODS)
        outcome_text = f"{attempt.outcome:<{outcome_width}}"
        name_text = f"{attempt.fault:<{fault_width}}"
        rows.append(f"{outcome_text}  {noticed}  {name_text}  {attempt.case:<{case_width}}  {attempt.cause}")
        if attempt.note and attempt.outcome is not Outcome.CAUGHT:
            rows.append(f"{'':<{outcome_width}}        {attempt.note}")
    return "\n".join([legend, *rows] if any(attempt.weaker for attempt in done) else rows)


def methods_table(done: Sequence[Attempt]) -> str:
    """Return the Markdown table of how many real bugs each method notices, among those for which weaker tests were measured.

    Faults of a family, modelled on no single bug, do not count here.
    """
    real = [attempt for attempt in done if attempt.real and attempt.weaker]
    rows = []
    for key, text in METHODS.items():
        rows.append((text, sum((attempt.weaker or {})[key] for attempt in real)))
    caught = [attempt for attempt in real if attempt.outcome is Outcome.CAUGHT]
    named = [attempt for attempt in caught if "not explained" not in attempt.kinds]
    rows += [("this harness", len(caught)), ("this harness, cause named and not only located", len(named))]
    lines = [f"| of {len(real)} real bugs, re-created | notices |", "|---|---|"]
    return "\n".join(lines + [f"| {text} | {count} |" for text, count in rows])
