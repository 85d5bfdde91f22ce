"""Drawings as SVG inside of a page: as wide as a phone, in the page's own colours, nothing that only a colour shows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from harness.core.evidence.text import escape_control_characters

WIDTH = 360  # a phone's; on wide screens drawings stand beside each other
ROW_HEIGHT = 18  # height of a row
CURVES_HEIGHT = 190  # of curves
SPARK_WIDTH = 120  # width of a spark
LETTER_WIDTH = 6.1  # the width of one of 10 px, in a font in which all are as wide; a page has such a font for strips
LEAST_BAR_WIDTH = 100  # at least, however long the texts beside it are
LANE_WIDTH = 620  # the width of a row of times


@dataclass(frozen=True)
class Strip:
    """A row: a rank and its bar."""

    rank: str
    """The rank's number, which is always shown whole."""
    place: str
    """Its place on each axis; empty for a single rank."""
    start: float
    """Where the part begins, from 0 to 1."""
    stop: float
    """Where the part ends, from 0 to 1."""
    text: str
    """What stands to the right of the bar."""
    odd: bool = False
    """Whether the part is not as requested."""


@dataclass(frozen=True)
class Curve:
    """A line over steps."""

    label: str
    """What it is."""
    values: Sequence[float | None]
    """A value for each step; a step without one leaves a gap."""
    kind: str
    """Its CSS class."""


def strips_svg(title: str, rows: Sequence[Strip]) -> str:
    """Return an SVG of rows below each other, as wide as their texts need; at least one row.

    An odd part is hatched as well as coloured.
    """
    number = LETTER_WIDTH * max(len(row.rank) for row in rows)
    left = number + LETTER_WIDTH * (max(len(escape_control_characters(row.place)) for row in rows) + 2)
    right = LETTER_WIDTH * (max(len(escape_control_characters(row.text)) for row in rows) + 1)
    width = max(WIDTH, math.ceil(left + LEAST_BAR_WIDTH + right))
    room = width - left - right
    parts = []
    for index, row in enumerate(rows):
        top = index * ROW_HEIGHT + 4
        bar_left = left + row.start * room
        parts += [
            _text_svg(number, top + 10, row.rank, "end"),
            _text_svg(number + LETTER_WIDTH, top + 10, row.place, "start"),
            f'<rect class="whole" x="{left:.1f}" y="{top}" width="{room:.1f}" height="12"/>',
            f'<rect class="{"odd" if row.odd else "part"}" x="{bar_left:.1f}" y="{top}" '
            f'width="{(row.stop - row.start) * room:.1f}" height="12"/>',
            _text_svg(width - right + LETTER_WIDTH, top + 10, row.text, "start"),
        ]
    return _picture_svg(title, len(rows) * ROW_HEIGHT + 6, parts, width=width, kind="strips")


@dataclass(frozen=True)
class Bar:
    """A stretch of time in a row."""

    start: float
    """When it begins, in seconds of the picture."""
    stop: float
    """When it ends."""
    text: str
    """What it is, which a browser shows beside the pointer."""
    odd: bool = False
    """Whether somebody waits in it: hatched as well as coloured."""


def lanes_svg(title: str, rows: Sequence[tuple[str, Sequence[Bar]]], length: float) -> str:
    """Return an SVG of rows of bars below each other over one time, each row with its name. At least one row.

    length: seconds that the whole width is.
    """
    left = LETTER_WIDTH * (max(len(escape_control_characters(name)) for name, _ in rows) + 1)
    width = math.ceil(left + LANE_WIDTH)
    parts = []
    for index, (name, bars) in enumerate(rows):
        top = index * ROW_HEIGHT + 4
        parts += [
            _text_svg(0, top + 10, name, "start"),
            f'<rect class="whole" x="{left:.1f}" y="{top}" width="{LANE_WIDTH}" height="12"/>',
        ]
        for bar in bars:
            bar_left = LANE_WIDTH * bar.start / length
            bar_width = max(LANE_WIDTH * (bar.stop - bar.start) / length, 0.4)
            kind = "odd" if bar.odd else "part"
            title_text = escape(escape_control_characters(bar.text))
            geometry = f'x="{left + bar_left:.1f}" y="{top}" width="{bar_width:.1f}" height="12"'
            parts.append(f'<rect class="{kind}" {geometry}><title>{title_text}</title></rect>')
    return _picture_svg(title, len(rows) * ROW_HEIGHT + 6, parts, width=width, kind="strips")


def curves_svg(title: str, steps: Sequence[int], lines: Sequence[Curve], *, log: bool = False) -> str:
    """Return an SVG of lines over steps, with levels and labels. log: decades up, values of 0 on the lowest line.

    Values that are None, NaN or infinite are left out.
    """
    known = []
    for line in lines:
        known += [value for value in line.values if value is not None and math.isfinite(value)]
    low, high = _decade_range(known) if log else _value_range(known)
    room = WIDTH - 60 - 14
    bottom = CURVES_HEIGHT - 26

    def across(index: int) -> float:
        if len(steps) > 1:
            return 60 + room * index / (len(steps) - 1)
        return 60 + room / 2

    def up(value: float) -> float:
        if log:
            value = math.log10(value) if value > 0 else low
        return bottom - (bottom - 8) * (min(max(value, low), high) - low) / (high - low)

    parts = []
    for level in (low, (low + high) / 2, high):
        level_text = f"1e{level:.0f}" if log else f"{level:.4g}"
        y = up(10**level if log else level)
        parts += [f'<line class="level" x1="60" x2="{WIDTH - 14}" y1="{y:.1f}" y2="{y:.1f}"/>']
        parts += [_text_svg(56, y + 4, level_text, "end")]
    parts += [
        _text_svg(across(index), CURVES_HEIGHT - 10, str(step), "middle") for index, step in _labelled_steps(steps)
    ]
    parts += [_curve_svg(line, across, up) for line in lines]
    return _picture_svg(title, CURVES_HEIGHT, parts)


def spark_svg(title: str, values: Sequence[float | None]) -> str:
    """Return an SVG of one line as high as a row of text, from 0 to its largest value. A None is left out."""
    largest = max((value for value in values if value is not None), default=0.0) or 1.0
    across = (SPARK_WIDTH - 8) / max(1, len(values) - 1)
    line = Curve(title, values, "observed")
    drawn = _curve_svg(
        line, lambda index: 4 + across * index, lambda value: ROW_HEIGHT + 2 - (ROW_HEIGHT - 4) * value / largest
    )
    return _picture_svg(title, ROW_HEIGHT + 6, [drawn], width=SPARK_WIDTH, kind="spark")


def _curve_svg(line: Curve, across: Callable[[int], float], up: Callable[[float], float]) -> str:
    """Return the SVG of one line and its dots; values that are None or not finite are left out.

    across, up: from an index and a value to a position in the picture.
    """
    known = [(index, value) for index, value in enumerate(line.values) if value is not None and math.isfinite(value)]
    points = " ".join(f"{across(index):.1f},{up(value):.1f}" for index, value in known)
    dots = "".join(f'<circle cx="{across(index):.1f}" cy="{up(value):.1f}" r="3"/>' for index, value in known)
    return f'<g class="curve {line.kind}"><polyline points="{points}"/>{dots}</g>'


def _value_range(known: Sequence[float]) -> tuple[float, float]:
    """Return the lowest and the highest level of a picture: the values' range with a margin of 5 %; about 0 to 1
    without values."""
    low, high = (min(known), max(known)) if known else (0.0, 1.0)
    margin = (high - low) * 0.05 or abs(high) * 0.05 or 1.0
    return low - margin, high + margin


def _decade_range(known: Sequence[float]) -> tuple[float, float]:
    """Return the exponents of the lowest and highest decade, at least two decades, with a whole decade in the middle.

    -17 and -15 if no value is above 0.
    """
    powers = [math.log10(value) for value in known if value > 0]
    low, high = (math.floor(min(powers)), math.ceil(max(powers))) if powers else (-17, -15)
    high = max(high, low + 2)
    return low, high + (high - low) % 2


def _labelled_steps(steps: Sequence[int]) -> list[tuple[int, int]]:
    """Return (index, step) of at most eight steps that have a label."""
    interval = max(1, math.ceil(len(steps) / 8))
    return [(index, step) for index, step in enumerate(steps) if index % interval == 0]


def _text_svg(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(escape_control_characters(text))}</text>'


def _picture_svg(title: str, height: int, parts: Sequence[str], *, width: int = WIDTH, kind: str = "curves") -> str:
    """Return the svg element around drawn parts. title: its label for a screen reader. kind: its CSS class."""
    label = escape(escape_control_characters(title))
    head = f'<svg class="{kind}" viewBox="0 0 {width} {height}" role="img" aria-label="{label}">'
    return head + "".join(parts) + "</svg>"
