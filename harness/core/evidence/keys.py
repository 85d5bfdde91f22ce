"""Short names for many things: a number for what is equal, and ranks as a person writes ranges."""

from __future__ import annotations

import functools
import hashlib
import json
from typing import Any


def number(things: Any) -> int:
    """The same for equal things, in every process."""
    return int.from_bytes(hashlib.blake2b(json.dumps(things).encode(), digest_size=8).digest())


@functools.lru_cache(maxsize=4096)
def ranks_key(ranks: tuple[int, ...]) -> str:
    """0-7, 0-56:8 (every eighth), 0,3,4."""
    steps = {b - a for a, b in zip(ranks, ranks[1:], strict=False)}
    if len(ranks) < 3 or len(steps) > 1:
        return ",".join(map(str, ranks))
    (step,) = steps
    return f"{ranks[0]}-{ranks[-1]}" + (f":{step}" if step > 1 else "")


def steps_text(steps: tuple[int, ...]) -> str:
    """step 2; steps 1-3"""
    return f"step{'s' * (len(steps) != 1)} {ranks_key(steps)}"


@functools.lru_cache(maxsize=65536)
def ranks_of(key: str) -> tuple[int, ...]:
    """The inverse."""
    if "-" not in key:
        return tuple(int(rank) for rank in key.split(",") if rank)
    span, _, step = key.partition(":")
    first, last = map(int, span.split("-"))
    return tuple(range(first, last + 1, int(step or 1)))
