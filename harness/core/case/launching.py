"""Choices of a person about a launch: where its ranks come from, and how long it may take."""

from __future__ import annotations

import re
from collections.abc import Sequence

SERVERS = ("resident", "own")
"""Kinds of the process that forks ranks: one outlives the command, the other ends with it."""
LONGEST_SECONDS = 604_800.0
"""Seconds that a person may give a launch: a week. One that compiles is given five times as many."""


def requested_ranks(command: Sequence[str]) -> int | None:
    """Return the number of ranks on all nodes that a launcher's options name; None if they name none, or not in decimals.

    The script's own options do not count. --num_processes already counts all nodes, --nproc-per-node one.
    """
    script = next((number for number, word in enumerate(command) if word.endswith(".py")), len(command))
    text = " ".join(command[:script]) + " "
    ranks = re.search(r"--nproc[-_]per[-_]node[= ](\d+) |--num[-_]processes[= ](\d+) ", text)
    nodes = re.search(r"--nnodes[= ](\S+)", text)
    if ranks is None or (nodes and not nodes.group(1).isdecimal()):
        return None
    return int(ranks.group(1) or ranks.group(2)) * (int(nodes.group(1)) if nodes and ranks.group(1) else 1)
