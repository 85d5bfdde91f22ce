"""Rows of a recording's page on process groups that the trainer made itself, and of which torch has no ranks."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Sequence

from harness.core.evidence.keys import steps_text
from harness.core.evidence.records import BACKGROUND, OwnGroup
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import bytes_text, count_text
from harness.core.evidence.unplaced import own_group_text

LABEL = "own groups"
NO_RANKS = "torch has no ranks of these process groups, so which ranks are in them is not recorded:"
MOST_ORIGINS = 4


def own_rows(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """Return rows on each place in the code that makes own groups: what they are and what a rank moved over them.

    Empty if no group has more ranks than one. At most MOST_ORIGINS places.
    """
    groups_by_origin: dict[tuple[str, str], dict[int, list[OwnGroup]]] = defaultdict(lambda: defaultdict(list))
    for summary in summaries:
        for group in summary.groups.own:
            groups_by_origin[group.kind, group.made][summary.rank].append(group)
    moving = []
    for by_rank in groups_by_origin.values():
        if any(_has_peers(groups) for groups in by_rank.values()):
            moving.append(by_rank)
    if not moving:
        return []
    rows = [(LABEL, NO_RANKS)]
    for by_rank in moving[:MOST_ORIGINS]:
        rows += [("", text) for text in _origin_texts(by_rank)]
    if len(moving) > MOST_ORIGINS:
        rows.append(("", f".. made at {len(moving) - MOST_ORIGINS} more places"))
    return rows


def _has_peers(groups: Sequence[OwnGroup]) -> bool:
    """Return whether one of the groups has more ranks than one, by its own size."""
    return any(group.size != 1 for group in groups)


def _origin_texts(by_rank: dict[int, list[OwnGroup]]) -> list[str]:
    """Return the texts on the groups made at one place, of the lowest rank that has one: the first group, and what
    moved over all.

    by_rank: rank -> its groups of that place.
    """
    rank, groups = min(by_rank.items())
    others_text = f", and others on {count_text(len(by_rank) - 1, 'more rank')}" if len(by_rank) > 1 else ""
    first = f"{own_group_text(groups[0])}: rank {groups[0].place} of it on rank {rank}{others_text}"
    if len(groups) > 1:
        sizes = ", ".join(f"{group.size} in step {group.step}" for group in groups[1 : 1 + MOST_ORIGINS])
        rest_text = f" and {len(groups) - 1 - MOST_ORIGINS} times more" if len(groups) > 1 + MOST_ORIGINS else ""
        first += f"; made anew of {sizes}{rest_text}"
    calls = sum(group.issued for group in groups)
    traffic = _traffic_texts(groups)
    if not traffic:
        return [first + (f"; {calls} calls, none in a step recorded" if calls else "; no call of it was seen")]
    return [first, *(f"  {text}" for text in traffic)]


def _traffic_texts(groups: Sequence[OwnGroup]) -> list[str]:
    """Return a text for each collective, phase and amount: bytes and calls of a rank, and in which steps.

    Empty if none ran.
    """
    amounts: dict[tuple[str, str, str], dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for call in itertools.chain.from_iterable(group.calls for group in groups):
        amounts[call.op, call.phase, call.dtype][call.step].update(calls=call.calls, bytes=call.bytes)
    texts = []
    for (op, phase, dtype), by_step in amounts.items():
        steps_by_amount: dict[tuple[int, int], list[int]] = defaultdict(list)
        for step, amount in sorted(by_step.items()):
            steps_by_amount[amount["calls"], amount["bytes"]].append(step)
        for (calls, size), steps in steps_by_amount.items():
            each_text = " each" if len(steps) > 1 else ""
            when = "" if phase == BACKGROUND else f" in {steps_text(tuple(steps))}{each_text}"
            plural = "s" if calls > 1 else ""
            texts.append(f"{op} in {phase}: {bytes_text(size)} {dtype} in {calls} call{plural}{when}")
    return texts
