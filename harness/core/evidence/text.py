"""Ranks, bytes, numbers and positions as a person writes them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

MAX_LISTED_RANKS = 32  # ranks that are still named one by one


def ranks_text(ranks: tuple[int, ...] | list[int]) -> str:
    """Return ranks as a person writes them: [0-7], [0,8], [0,2,4,6]; many of them are [0,8,..,1016]."""
    ranks = sorted(ranks)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}-{ranks[-1]}]"
    if len(ranks) > MAX_LISTED_RANKS and ranks == list(range(ranks[0], ranks[-1] + 1, ranks[1] - ranks[0])):
        return f"[{ranks[0]},{ranks[1]},..,{ranks[-1]}]"
    return "[" + ",".join(map(str, ranks)) + "]"


def some_ranks_text(ranks: Iterable[int], limit: int = 6) -> str:
    """Return a text of ranks, of which at most `limit` are named: "rank 3", "ranks 0-6", "ranks 0, 4, 9 and 12 more"."""
    listed = sorted(set(ranks))
    if len(listed) == 1:
        return f"rank {listed[0]}"
    if listed == list(range(listed[0], listed[-1] + 1)):
        return f"ranks {listed[0]}-{listed[-1]}"
    text = f"ranks {', '.join(map(str, listed[:limit]))}"
    if len(listed) > limit:
        return f"{text} and {len(listed) - limit} more"
    return text


def bytes_text(count: float) -> str:
    """Return a number of bytes in decimal units, four digits: "1.051 MB"."""
    for unit in ("B", "kB", "MB"):
        if abs(count) < 1000:
            return f"{count:.4g} {unit}"
        count /= 1000
    return f"{count:.4g} GB"


def number_text(value: float, digits: int = 6) -> str:
    """Return the number with that many significant digits. A zero has no sign: which one it gets depends on the processor."""
    text = f"{value:.{digits}g}"
    return "0" if text == "-0" else text


def escape_control_characters(text: str) -> str:
    """Return the text with each character that is obeyed rather than shown as its escape, such as \\x1b."""
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() or letter in "\n\t" else _escape_sequence(letter) for letter in text)


def _escape_sequence(letter: str) -> str:
    return letter.encode("unicode_escape").decode()


def count_text(count: int, noun: str) -> str:
    """Return a count with its noun: "1 tensor", "2 tensors". noun: in the singular."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def names_text(names: Sequence[str], limit: int = 3) -> str:
    """Return the number of parameters and the first `limit` names: "4 parameters (a, b, c, ..)"."""
    listed = ", ".join(names[:limit])
    if len(names) > limit:
        listed += ", .."
    return f"{count_text(len(names), 'parameter')} ({listed})"


def positions_text(positions: Iterable[int]) -> str:
    """Return positions as a text, runs joined: "0-3 and 12-15"."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and position == runs[-1][-1] + 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    return " and ".join(texts)
