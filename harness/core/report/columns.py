"""Rows of cells as lines of text."""

from __future__ import annotations

from collections.abc import Sequence


def column_lines(rows: Sequence[Sequence[str]], *, indent: int = 2) -> list[str]:
    """Return rows of cells as lines, each column as wide as its longest cell.

    A column that has only numbers below its first row is aligned to the right.
    """
    padded = [_pad_column(column) for column in zip(*rows, strict=True)]
    return [" " * indent + "  ".join(row).rstrip() for row in zip(*padded, strict=True)]


def _pad_column(cells: Sequence[str]) -> list[str]:
    """Return the cells of a column padded to equal width: to the right if all cells below the first begin with a digit
    or "+"."""
    width = max(map(len, cells))
    are_numbers = all(cell[:1].isdigit() or cell[:1] == "+" for cell in cells[1:])
    return [cell.rjust(width) if are_numbers else cell.ljust(width) for cell in cells]
