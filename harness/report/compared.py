"""Two recordings: what differs in structure, by axis, and separately what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from harness.evidence.text import bytes_text
from harness.judge.structure import Difference
from harness.report.text import wrapped

MOST = 40


def compared(
    one: str,
    other: str,
    found: Sequence[Difference],
    cost: tuple[Mapping[str, float], Mapping[str, float]],
    outside: str = "",
) -> list[str]:
    """outside: in which steps collectives outside of passes were compared."""
    said = wrapped(f"outside of forward and backward: {outside}", "  ", "    ") if outside else []
    return [f"{one} -> {other}: {counted(found)}", *listed(found), *said, *_costs(*cost)]


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


def _costs(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    texts = ratios(one, other)
    return [f"  cost, which is no structure: {', '.join(texts)}"] if texts else []


def ratios(one: Mapping[str, float], other: Mapping[str, float]) -> list[str]:
    """No two runs have the same costs."""
    both = [name for name in one if name in other and one[name]]
    return [f"{name} x {other[name] / one[name]:.2f}" for name in both]
