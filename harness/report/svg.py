"""Drawings as SVG inside of a page: as wide as a phone, in the page's own colours, nothing that only a colour tells."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from harness.evidence.text import visible

WIDTH = 360  # a phone's; on wide screens drawings stand beside each other
LEFT, RIGHT, ROW, HEIGHT = 92, 78, 18, 190


@dataclass(frozen=True)
class Strip:
    """A row: the whole as a bar, of it the part from `start` to `stop`, both between 0 and 1. text: beside it."""

    label: str
    start: float
    stop: float
    text: str
    odd: bool = False


@dataclass(frozen=True)
class Curve:
    """values: by step; a step without one leaves a gap. kind: its CSS class."""

    label: str
    values: Sequence[float | None]
    kind: str


def strips(title: str, rows: Sequence[Strip]) -> str:
    """One row below the other. A part that is odd is hatched besides its colour."""
    room = WIDTH - LEFT - RIGHT
    parts = []
    for number, row in enumerate(rows):
        top, at = number * ROW + 4, LEFT + row.start * room
        parts += [
            _text(LEFT - 6, top + 9, row.label, "end"),
            f'<rect class="whole" x="{LEFT}" y="{top}" width="{room}" height="12"/>',
            f'<rect class="{"odd" if row.odd else "part"}" x="{at:.1f}" y="{top}" '
            f'width="{(row.stop - row.start) * room:.1f}" height="12"/>',
            _text(WIDTH - RIGHT + 6, top + 9, row.text, "start"),
        ]
    return _svg(title, len(rows) * ROW + 6, parts)


def curves(title: str, steps: Sequence[int], lines: Sequence[Curve], *, log: bool = False) -> str:
    """Over steps. log: values of 0 stand on the lowest line, and the axis says so."""
    known = [value for line in lines for value in line.values if value is not None and math.isfinite(value)]
    low, high = _log_range(known) if log else _range(known)
    room, bottom = WIDTH - 60 - 14, HEIGHT - 26

    def across(index: int) -> float:
        return 60 + (room * index / (len(steps) - 1) if len(steps) > 1 else room / 2)

    def up(value: float) -> float:
        value = (math.log10(value) if value > 0 else low) if log else value
        return bottom - (bottom - 8) * (min(max(value, low), high) - low) / (high - low)

    parts = []
    for level in (low, (low + high) / 2, high):
        said = f"1e{level:.0f}" if log else f"{level:.4g}"
        at = up(10**level if log else level)
        parts += [f'<line class="level" x1="60" x2="{WIDTH - 14}" y1="{at:.1f}" y2="{at:.1f}"/>']
        parts += [_text(56, at + 4, said, "end")]
    parts += [_text(across(index), HEIGHT - 10, str(step), "middle") for index, step in _some(steps)]
    parts += [_line(line, across, up) for line in lines]
    return _svg(title, HEIGHT, parts)


def _line(line: Curve, across: Callable[[int], float], up: Callable[[float], float]) -> str:
    seen = [(i, v) for i, v in enumerate(line.values) if v is not None and math.isfinite(v)]
    points = " ".join(f"{across(index):.1f},{up(value):.1f}" for index, value in seen)
    dots = "".join(f'<circle cx="{across(i):.1f}" cy="{up(v):.1f}" r="3"/>' for i, v in seen)
    return f'<g class="curve {line.kind}"><polyline points="{points}"/>{dots}</g>'


def _range(known: Sequence[float]) -> tuple[float, float]:
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _log_range(known: Sequence[float]) -> tuple[float, float]:
    """Whole decades with a whole one in the middle."""
    powers = [math.log10(value) for value in known if value > 0]
    low, high = (math.floor(min(powers)), math.ceil(max(powers))) if powers else (-17, -15)
    high = max(high, low + 2)
    return low, high + (high - low) % 2


def _some(steps: Sequence[int]) -> list[tuple[int, int]]:
    """At most eight labels."""
    every = max(1, math.ceil(len(steps) / 8))
    return [(index, step) for index, step in enumerate(steps) if index % every == 0]


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(visible(text))}</text>'


def _svg(title: str, height: int, parts: Sequence[str]) -> str:
    head = f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(visible(title))}">'
    return head + "".join(parts) + "</svg>"
