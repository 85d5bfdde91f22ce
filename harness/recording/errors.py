"""What an exception says, in one line."""

from __future__ import annotations

TRACE = "Traceback (most recent call last):"
LONGEST = 300


def in_one_line(kind: type[BaseException], error: BaseException) -> str:
    """Return the error with its cause. The cause is the last line of another process's traceback (a loader's worker, a spawned
    rank), or the line after a first one that only announces it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[:1]
    if any(line.endswith(TRACE) for line in lines):
        said = [] if lines[0].endswith(TRACE) else [lines[0].rstrip(".:")]
        said.append(lines[-1])
    elif len(lines) > 1 and lines[0].endswith(":"):
        said = [lines[0].rstrip(":"), lines[1]]
    return ": ".join([kind.__name__, *said])[:LONGEST]
