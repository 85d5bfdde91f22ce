"""Lines on two recordings, or the traces of two jobs: differences in structure, by axis, and separately in what they took."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from harness.core.evidence.text import bytes_text
from harness.core.report.columns import column_lines
from harness.core.report.text import wrap_text
from harness.recording.judged.figures import EXPOSED, TIME, WAITS, Shift
from harness.recording.judged.structure import Difference

MOST_LINES = 40
MEANING = {
    WAITS: "blocked: seconds of a step that a rank's thread was in a call, or in a wait from Python right after it; the "
    "waits of C++ code are not seen",
    EXPOSED: "exposed: seconds of a step and a rank in which no other kernel ran beside the collective's",
}


def comparison_lines(
    first_name: str,
    second_name: str,
    differences: Sequence[Difference],
    shifts: Sequence[Shift],
    outside: str = "",
    notes: Sequence[str] = (),
) -> list[str]:
    """Return the page: a title with the number of differences, those in structure, notes, and a table of figures that
    differ.

    shifts: figures that differ. outside: in which steps collectives outside of passes were compared. notes: what was
    not compared.
    """
    title = difference_count_text(differences) if differences or not notes else "no difference in what was compared"
    if outside:
        notes = [f"outside of forward and backward: {outside}", *notes]
    note_lines = itertools.chain.from_iterable(wrap_text(note, "  ", "    ") for note in notes)
    return [
        f"{first_name} -> {second_name}: {title}",
        *difference_lines(differences),
        *note_lines,
        *shift_lines([("", shift) for shift in shifts]),
    ]


def difference_count_text(differences: Sequence[Difference]) -> str:
    """Return how many differences in structure there are, in words; "the same structure" if there is none."""
    if not differences:
        return "the same structure"
    plural = "" if len(differences) == 1 else "s"
    return f"{len(differences)} difference{plural} in structure"


def difference_lines(differences: Sequence[Difference]) -> list[str]:
    """Return the lines on differences in structure, below the place that each is in; empty if there is none.

    At most MOST_LINES differences; a last line says how many more there are.
    """
    lines: list[str] = []
    previous_place: tuple[str, ...] = ()
    for difference in differences[:MOST_LINES]:
        *location, name = difference.where
        if tuple(location) != previous_place and location:
            lines.append(f"  {', '.join(location)}")
        previous_place = tuple(location)
        lines += wrap_text(
            f"{name}: {_difference_amount_text(name, difference.one)} -> {_difference_amount_text(name, difference.other)}",
            "    " if location else "  ",
            "    ",
        )
    return lines + ([f"  and {len(differences) - MOST_LINES} more"] if len(differences) > MOST_LINES else [])


def _difference_amount_text(name: str, text: str) -> str:
    """Return the text of a value. An exact number of bytes gets a readable unit in front: "1.051 MB (1051000)".

    name: the entry's key, which says whether it is in bytes.
    """
    sized = name in ("bytes", "parameters", "gradients", "optimizer_state", "parameters as forward ends")
    return f"{bytes_text(int(text))} ({text})" if sized and text.isdigit() else text


def shift_lines(cases_and_shifts: Sequence[tuple[str, Shift]], where: str = "") -> list[str]:
    """Return a table of the figures that differ, in their order, and below it those within the noise.

    Empty if there is none. cases_and_shifts: each figure with the case that it is of, empty for none. where: on what
    seconds were measured. At most MOST_LINES of either; a line says how many more there are.
    """
    clear_shifts = [case_and_shift for case_and_shift in cases_and_shifts if case_and_shift[1].within is not True]
    shifts_in_noise = [case_and_shift for case_and_shift in cases_and_shifts if case_and_shift[1].within is True]
    if not cases_and_shifts:
        return []
    rows = [("", "before", "after", "change"), *(_shift_row(case, shift) for case, shift in clear_shifts[:MOST_LINES])]
    table = column_lines(rows) if clear_shifts else []
    if len(clear_shifts) > MOST_LINES:
        table.append(f"  and {len(clear_shifts) - MOST_LINES} more")
    title = "what they took, the largest change first; it is no structure"
    if where:
        title += f"; {where}"
    texts = [
        f"within the spread of its steps: {_noise_text(case, shift)}" for case, shift in shifts_in_noise[:MOST_LINES]
    ]
    if len(shifts_in_noise) > MOST_LINES:
        texts.append(f"and {len(shifts_in_noise) - MOST_LINES} more within it")
    if any(shift.within is None for _, shift in clear_shifts):
        texts.append("*: too few steps to show the noise")
    kinds = {shift.kind for _, shift in cases_and_shifts}
    texts += [text for kind, text in MEANING.items() if kind in kinds]
    text_lines = itertools.chain.from_iterable(wrap_text(text, "  ", "    ") for text in texts)
    return ["", f"{title}:", *table, *text_lines]


def _shift_row(case: str, shift: Shift) -> tuple[str, str, str, str]:
    """Return the table's row of a figure: name, before, after, change.

    The change is "new" from 0 and "gone" to 0. A star behind it: too few steps to show the noise.
    """
    name = ": ".join(filter(None, (case, figure_name(shift))))
    if not shift.one:
        change = "new"
    elif not shift.other:
        change = "gone"
    else:
        change = change_text(shift.other / shift.one)
    if shift.within is None:
        change += "*"
    return name, amount_text(shift.unit, shift.one), amount_text(shift.unit, shift.other), change


def figure_name(shift: Shift) -> str:
    """Return the figure's name behind its kind; the name alone if it begins with its kind."""
    return shift.of if shift.of.startswith(shift.kind) else f"{shift.kind}, {shift.of}"


def _noise_text(case: str, shift: Shift) -> str:
    """Return the figure's name, and the range of its values in both jobs. case: empty for none."""
    ranges = (
        f"{amount_text(shift.unit, lowest)} to {amount_text(shift.unit, highest)}" for lowest, highest in shift.spread
    )
    return f"{': '.join(filter(None, (case, figure_name(shift))))}, {' -> '.join(ranges)}"


def change_text(ratio: float) -> str:
    """Return a ratio as a change: "+12 %", "-3.5 %"; from 2 on as "x 4"."""
    if ratio >= 2:
        return f"x {ratio:.3g}"
    return f"{100 * (ratio - 1):+.3g} %"


def amount_text(unit: str, value: float) -> str:
    """Return an amount with its unit, as "1.5 s", "20 ms" or "1.051 MB". unit: TIME for seconds, anything else for bytes."""
    if unit != TIME:
        return bytes_text(value) if value else "0 B"
    return f"{value:.3g} s" if value >= 1 or not value else f"{1e3 * value:.3g} ms"
