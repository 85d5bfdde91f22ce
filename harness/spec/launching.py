"""What a person may choose of a launch: where its ranks come from, and how long it may take."""

from __future__ import annotations

SERVERS = ("resident", "own")
"""Kinds of the process that forks ranks: one outlives the command, the other ends with it."""
LONGEST = 604_800.0
"""Seconds that a person may give a launch: a week. One that compiles is given five times as many."""
