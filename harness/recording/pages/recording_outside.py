"""The rows of a recording's page on what moved outside of forward and backward, or beside the thread that trains."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from harness.core.evidence.keys import ranks_of, steps_text
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import bytes_text, counted
from harness.recording.judged.outside_passes import PHASES, Line, lines, whole_steps

LABEL = "outside passes"
MOST = 4


def outside_rows(summaries: Sequence[Summary], groups_text: Callable[[Sequence[str]], str]) -> list[tuple[str, str]]:
    """Where there is nothing that is said too: clipping that was forgotten looks like that."""
    steps = whole_steps(summaries)
    if not steps or len(summaries) == 1:
        return []
    found = [
        f"{_what(line.op, line.dtype)}{PHASES.get(line.phase, '')} over {groups_text(line.groups)}: {_amount(line)}"
        for line in lines(summaries, axes_apart=True)
    ]
    if not found and any(one.own_groups or one.failed or not one.saw_a_step for one in summaries):
        return []
    none = f"no collective ran outside of forward and backward, in {steps_text(steps)}"
    return [(LABEL if number == 0 else "", text) for number, text in enumerate(found or [none])]


def background_rows(summaries: Sequence[Summary], groups_text: Callable[[Sequence[str]], str]) -> list[tuple[str, str]]:
    """Rows on what other threads issue, such as a checkpoint that is written while training goes on."""
    groups: dict[tuple[str, str, int, int], set[str]] = {}
    for use in (use for one in summaries for use in one.background):
        groups.setdefault((use.op, use.dtype, use.calls, use.bytes), set()).add(use.ranks)
    found = []
    for (op, dtype, calls, size), over in sorted(groups.items()):
        amount = f"{bytes_text(size)} in {counted(calls, 'call')}"
        found.append(f"{_what(op, dtype)} over {groups_text(sorted(over, key=ranks_of))}: {amount}")
    shown = [*found[:MOST], *[f".. and {len(found) - MOST} more kinds"] * (len(found) > MOST)]
    return [("other threads" if number == 0 else "", text) for number, text in enumerate(shown)]


def _what(op: str, dtype: str) -> str:
    """A barrier's payload is torch's own."""
    return op if op == "barrier" else f"{op} of {dtype}"


def _amount(line: Line) -> str:
    alike: dict[str, list[int]] = {}
    for step in line.calls:
        alike.setdefault(_once(line, step), []).append(step)
    if len(alike) == 1 < len(line.calls):
        return f"{next(iter(alike))} a step"
    return "; ".join(f"{text} in {steps_text(tuple(at))}" for text, at in alike.items())


def _once(line: Line, step: int) -> str:
    (few, many), (least, most) = line.calls[step], line.bytes[step]
    if not many:
        return "none"
    size = bytes_text(most) if least == most else f"{bytes_text(least)} to {bytes_text(most)}"
    calls = f"{few if few == many else f'{few} to {many}'} call{'s' * (many > 1)}"
    return f"{size} in {calls}" if most else calls
