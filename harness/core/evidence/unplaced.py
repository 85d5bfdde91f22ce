"""Process groups that a trainer made itself, in words: what they are, and why what ran over them is not judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.core.evidence.records import BACKGROUND, OwnGroup


def own_group_text(group: OwnGroup) -> str:
    """Return its class, size and place in the code: ProcessGroupGloo of 2 ranks (made at train.py:5)."""
    size = "" if group.size is None else f" of {group.size} rank{'s' * (group.size != 1)}"
    return f"{group.kind}{size}" + (f" (made at {group.made})" if group.made else "")


def unplaced(groups: Mapping[int, Iterable[OwnGroup]]) -> str:
    """Return why it is not known between which ranks everything moved; empty where it is known. groups: by rank.

    Barriers, and what was set up before the first step, move nothing that a check asks for, nor does a group of one rank."""
    for rank, own in sorted(groups.items()):
        for group in (one for one in own if one.size != 1):
            if not group.issued:
                return (
                    f"rank {rank} made a process group that torch has no ranks of, none called: {own_group_text(group)}"
                )
            if any(call.op != "barrier" and (call.step or call.phase == BACKGROUND) for call in group.calls):
                return f"rank {rank} uses a process group that torch has no ranks of: {own_group_text(group)}"
    return ""
