"""Calls of collectives as ranks issue them: which of two are one call, what members must have in common, and a text of each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from harness.core.evidence.summary import WITHOUT_PLACE
from harness.core.evidence.text import ranks_text

GROUP_CREATION = ("init_process_group", "new_group")
"""Operators of calls that make a group."""
POINT_TO_POINT = {"send": "recv", "recv": "send"}
"""Operators between two ranks -> what the other side issues."""
EQUAL_BYTES = {
    "all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "reduce",
    "gather",
    "scatter",
    *POINT_TO_POINT,
}
"""Operators of which every member has as many bytes on record. In an all_to_all each may pass another number of rows."""
UNKNOWN_STEP = -1
"""The step of a call that is issued in no step that is known."""

GroupKey = tuple[str, tuple[int, ...]]
"""A group, by name and members: two groups of one split can share a name."""


@dataclass(frozen=True)
class Issued:
    """A collective as one rank issued it, or the making of a group."""

    group: str
    """Name of the group."""
    ranks: tuple[int, ...]
    """Global ranks of the group."""
    seq: int
    """Position among this rank's collectives of the group, or among its sends to a peer, or its receives from it."""
    op: str
    """Name of the collective; init_process_group or new_group for the making of a group."""
    bytes: int | None
    """Bytes, as of evidence.Collective; None if they are not on record."""
    step: int = 0
    """Step, 0 before the first one, UNKNOWN_STEP if it is not known."""
    phase: str = ""
    """Phase, as of evidence.Collective; empty if it is not known."""
    peer: int | None = None
    """Global rank of the other side of a send or receive; None for others, and of a receive from any rank."""
    order: int = 0
    """Position in all that this rank issued."""
    root: int | None = None
    """Global rank of the root; None if there is none, or if it is not on record."""
    dtype: str = ""
    """Dtype of its elements; empty if it is not on record."""
    time: float = 0.0
    """When it was about to be issued, in seconds since 1970 on the clock of its machine; 0 if it is not on record."""


def group_key(issued: Issued) -> GroupKey:
    return issued.group, issued.ranks


def is_collective(issued: Issued) -> bool:
    """Return whether all members of a group issue it under one number. Sends and receives are counted for each pair of ranks,
    and the making of groups is a sequence of its own."""
    return issued.op not in POINT_TO_POINT and issued.op not in GROUP_CREATION


def is_same_call(first: Issued, second: Issued) -> bool:
    """Return whether two ranks issued one and the same call: a group that is made may have got another name."""
    if first.op in GROUP_CREATION or second.op in GROUP_CREATION:
        return (first.op, first.ranks) == (second.op, second.ranks)
    return (group_key(first), first.seq) == (group_key(second), second.seq)


def call_signature(issued: Issued) -> Hashable:
    """Return what the calls of all members of a group must have in common under one number.

    Without bytes on record that is operator, step and phase; of a broadcast the operator alone, as DDP broadcasts buffers in a
    rank's first forward pass, which on some ranks may train nothing.
    """
    if issued.bytes is None:
        return issued.op, None if issued.op == WITHOUT_PLACE else (issued.step, issued.phase)
    dtype = "" if issued.op == "barrier" else issued.dtype
    return issued.op, issued.root, dtype, issued.bytes if issued.op in EQUAL_BYTES else None


def describe_call(issued: Issued) -> str:
    """Return a call as a text: `all_reduce #12 of group [0-3] (step 2, backward, 16.4 KB)`."""
    if issued.op in GROUP_CREATION:
        return f"{issued.op} #{issued.seq} of group {ranks_text(issued.ranks)}"
    peer = "" if issued.peer is None else f" {'to' if issued.op == 'send' else 'from'} rank {issued.peer}"
    root = "" if issued.root is None else f"root {issued.root}"
    outside = issued.phase == "other"
    about = ", ".join(filter(None, [_step_text(issued), "" if outside else issued.phase, root, _payload_text(issued)]))
    return f"{issued.op} #{issued.seq}{peer} of group {ranks_text(issued.ranks)}{f' ({about})' if about else ''}"


def _step_text(issued: Issued) -> str:
    """Return the step of a call as a text; empty if it is not known."""
    if issued.step == 0:
        return "before the first pass"
    if issued.step < 0:
        return ""
    if issued.phase == "other":  # a step begins with its first pass: a trainer's own may have begun before
        return f"step {issued.step} or behind it, outside of passes"
    return f"step {issued.step}"


def _payload_text(issued: Issued) -> str:
    """Return bytes and dtype of a call as a text; empty if the bytes are not on record."""
    if issued.bytes is None:
        return ""
    return f"{size_text(issued.bytes)} {issued.dtype}" if issued.bytes and issued.dtype else size_text(issued.bytes)


def size_text(count: int) -> str:
    """Return a number of bytes as a text with three or fewer digits before the unit: `16.4 KB`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "KB")):
        if count >= unit:
            return f"{count / unit:.1f} {name}"
    return f"{count} B"
