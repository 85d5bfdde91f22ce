"""Short names for many things: a number for what is equal, and ranks as a person writes ranges."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any


def stable_digest(things: Any) -> int:
    """Return a number of 64 bits that is the same for equal things, in every process. things: plain values of JSON."""
    return int.from_bytes(hashlib.blake2b(json.dumps(things).encode(), digest_size=8).digest())


@functools.lru_cache(maxsize=4096)
def ranks_key(ranks: tuple[int, ...]) -> str:
    """Return ascending ranks as a short text: 0-7, 0-56:8 (every eighth), 0,3,4. Empty for none."""
    strides = {following - rank for rank, following in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) < 3 or len(strides) > 1:
        return ",".join(map(str, ranks))
    (stride,) = strides
    if stride > 1:
        return f"{ranks[0]}-{ranks[-1]}:{stride}"
    return f"{ranks[0]}-{ranks[-1]}"


def steps_text(steps: tuple[int, ...]) -> str:
    """Return steps as a text: "step 2", "steps 1-3"."""
    word = "step" if len(steps) == 1 else "steps"
    return f"{word} {ranks_key(steps)}"


@functools.lru_cache(maxsize=65536)
def ranks_from_key(key: str) -> tuple[int, ...]:
    """Return the ranks that a text of ranks_key names, ascending. Raises ValueError for a text that is none."""
    if "-" not in key:
        return tuple(int(rank) for rank in key.split(",") if rank)
    span, _, stride = key.partition(":")
    first, last = map(int, span.split("-"))
    return tuple(range(first, last + 1, int(stride or 1)))
