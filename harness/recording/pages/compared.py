"""Two recordings, or the traces of two jobs: what differs in structure, by axis, and separately in what they took."""

from __future__ import annotations

from collections.abc import Sequence

from harness.core.evidence.text import bytes_text
from harness.core.report.columns import columns
from harness.core.report.text import wrapped
from harness.recording.judged.figures import EXPOSED, TIME, WAITS, Shift
from harness.recording.judged.structure import Difference

MOST = 40
MEANING = {
    WAITS: "blocked: seconds of a step that a rank's thread was in a call, or in a wait from Python right after it; the "
    "waits of C++ code are not seen",
    EXPOSED: "exposed: seconds of a step and a rank in which no other kernel ran beside the collective's",
}


def compared(
    one: str,
    other: str,
    found: Sequence[Difference],
    moved: Sequence[Shift],
    outside: str = "",
    notes: Sequence[str] = (),
) -> list[str]:
    """moved: figures that differ. outside: in which steps collectives outside of passes were compared. notes: what was not
    compared."""
    title = counted(found) if found or not notes else "no difference in what was compared"
    notes = [*([f"outside of forward and backward: {outside}"] if outside else []), *notes]
    said = [line for note in notes for line in wrapped(note, "  ", "    ")]
    return [f"{one} -> {other}: {title}", *listed(found), *said, *shifted([("", each) for each in moved])]


def counted(found: Sequence[Difference]) -> str:
    return f"{len(found)} difference{'s' * (len(found) != 1)} in structure" if found else "the same structure"


def listed(found: Sequence[Difference]) -> list[str]:
    lines: list[str] = []
    before: tuple[str, ...] = ()
    for each in found[:MOST]:
        *place, name = each.where
        if tuple(place) != before and place:
            lines.append(f"  {', '.join(place)}")
        before = tuple(place)
        lines += wrapped(
            f"{name}: {_amount(name, each.one)} -> {_amount(name, each.other)}", "    " if place else "  ", "    "
        )
    return lines + ([f"  and {len(found) - MOST} more"] if len(found) > MOST else [])


def _amount(name: str, text: str) -> str:
    """Bytes for a person, beside the exact number."""
    sized = name in ("bytes", "parameters", "gradients", "optimizer_state", "parameters as forward ends")
    return f"{bytes_text(int(text))} ({text})" if sized and text.isdigit() else text


def shifted(moved: Sequence[tuple[str, Shift]], where: str = "") -> list[str]:
    """Return a table of figures, each with the case that it is of, in the order of the list, and what lies within the noise.
    where: on what seconds were measured."""
    clear = [each for each in moved if each[1].within is not True]
    noise = [each for each in moved if each[1].within is True]
    if not moved:
        return []
    rows = [("", "before", "after", "change"), *(_row(*each) for each in clear[:MOST])]
    table = columns(rows) if clear else []
    table += [f"  and {len(clear) - MOST} more"] if len(clear) > MOST else []
    title = "what they took, the largest change first; it is no structure" + (f"; {where}" if where else "")
    texts = [f"within the spread of its steps: {_noise(*each)}" for each in noise[:MOST]]
    texts += [f"and {len(noise) - MOST} more within it"] * (len(noise) > MOST)
    if any(each.within is None for _, each in clear):
        texts.append("*: too few steps to show the noise")
    texts += [text for kind, text in MEANING.items() if any(each.kind == kind for _, each in moved)]
    return ["", f"{title}:", *table, *(line for text in texts for line in wrapped(text, "  ", "    "))]


def _row(case: str, one: Shift) -> tuple[str, str, str, str]:
    name = ": ".join(filter(None, (case, named(one))))
    change = "new" if not one.one else "gone" if not one.other else change_text(one.other / one.one)
    return name, amount(one.unit, one.one), amount(one.unit, one.other), change + "*" * (one.within is None)


def named(one: Shift) -> str:
    """Return the figure's name, which for some begins with its kind."""
    return one.of if one.of.startswith(one.kind) else f"{one.kind}, {one.of}"


def _noise(case: str, one: Shift) -> str:
    ranges = (f"{amount(one.unit, least)} to {amount(one.unit, most)}" for least, most in one.spread)
    return f"{': '.join(filter(None, (case, named(one))))}, {' -> '.join(ranges)}"


def change_text(ratio: float) -> str:
    """+12 %, -3.5 %, x 4."""
    if ratio >= 2:
        return f"x {ratio:.3g}"
    return f"{100 * (ratio - 1):+.3g} %"


def amount(unit: str, value: float) -> str:
    """Write seconds or bytes."""
    if unit != TIME:
        return bytes_text(value) if value else "0 B"
    return f"{value:.3g} s" if value >= 1 or not value else f"{1e3 * value:.3g} ms"
