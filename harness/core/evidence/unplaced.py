"""Texts on process groups that a trainer made itself: the group, and the reason why its collectives are not judged."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from harness.core.evidence.records import BACKGROUND, OwnGroup
from harness.core.evidence.text import count_text


def own_group_text(group: OwnGroup) -> str:
    """Return a text of a group's class, size and line of code: "ProcessGroupGloo of 2 ranks (made at train.py:5)"."""
    text = group.kind
    if group.size is not None:
        text += f" of {count_text(group.size, 'rank')}"
    if group.made:
        text += f" (made at {group.made})"
    return text


def unplaced_groups_reason(groups: Mapping[int, Iterable[OwnGroup]]) -> str:
    """Return the reason why it is unknown between which ranks some bytes moved; empty if it is known. groups: by rank.

    It is of the first rank that uses such a group, or that made one and was never seen to call it. Barriers, calls
    before the first step and groups of one rank move nothing that a check asks for.
    """
    for rank, own_groups in sorted(groups.items()):
        for group in own_groups:
            if group.size == 1:
                continue
            if not group.issued:
                return (
                    f"rank {rank} made a process group that torch has no ranks of, none called: {own_group_text(group)}"
                )
            if any(call.op != "barrier" and (call.step or call.phase == BACKGROUND) for call in group.calls):
                return f"rank {rank} uses a process group that torch has no ranks of: {own_group_text(group)}"
    return ""
