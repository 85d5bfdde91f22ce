"""The question "did you mean ...?" behind a name that does not exist."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

MAX_OFFERED = 3
CLOSE = 0.6
CLOSE_FOR_SHORT_WORDS = 0.5  # of two letters, one is half of them
SHORT_WORD = 3
ABOUT_AS_CLOSE = 0.05
SHORTEST_SHARED_WORD = 4  # "dp" and "of" stand in too many names to tell which one is meant


def did_you_mean(word: object, known: Iterable[object]) -> str:
    """Return " (did you mean 'tp'?)" with up to three near names, the shortest first; empty if no name is near."""
    offered = [repr(name) for name in near_names(str(word), [str(name) for name in known])]
    if not offered:
        return ""
    if len(offered) == 1:
        return f" (did you mean {offered[0]}?)"
    return f" (did you mean {', '.join(offered[:-1])} or {offered[-1]}?)"


def near_names(word: str, known: Iterable[str]) -> list[str]:
    """Return up to three names that may be meant by `word`, the shortest first.

    Names that begin with the word come before names that are spelled alike, and these before names that share a part.
    """
    if not re.search(r"\w", word):
        return []
    names = sorted(set(known), key=lambda name: (len(name), name))
    near = (
        _names_that_begin_with(word, names)
        or _names_spelled_alike(word, names)
        or _names_with_a_shared_part(word, names)
    )
    return near[:MAX_OFFERED]


def _names_that_begin_with(word: str, names: Iterable[str]) -> list[str]:
    return [name for name in names if name.startswith(word)]


def _names_spelled_alike(word: str, names: Iterable[str]) -> list[str]:
    """Return the names that are spelled most like the word: the closest one, and others about as close."""
    bare = re.sub(r"[^\w-]", "", word)
    closeness = {name: difflib.SequenceMatcher(None, bare, name).ratio() for name in names}
    limit = CLOSE_FOR_SHORT_WORDS if len(bare) <= SHORT_WORD else CLOSE
    closest = max(closeness.values(), default=0.0)
    if closest < limit:
        return []
    return [name for name, ratio in closeness.items() if ratio >= closest - ABOUT_AS_CLOSE]


def _names_with_a_shared_part(word: str, names: Iterable[str]) -> list[str]:
    parts = {part for part in re.split(r"[\W_]+", word) if len(part) >= SHORTEST_SHARED_WORD}
    return [name for name in names if parts & set(re.split(r"[\W_]+", name))]
