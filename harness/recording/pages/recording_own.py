"""The rows of a recording's page on process groups that the trainer made itself, and on groups that two threads use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from harness.core.evidence.keys import steps_text
from harness.core.evidence.records import BACKGROUND, OwnGroup
from harness.core.evidence.summary import Summary
from harness.core.evidence.text import bytes_text
from harness.core.evidence.unplaced import own_group_text

LABEL = "own groups"
NO_RANKS = "torch has no ranks of these process groups, so which ranks are in them is not recorded:"
MOST = 4


def own_rows(summaries: Sequence[Summary]) -> list[tuple[str, str]]:
    """Rows on each place in the code that makes own groups: what they are and what a rank moved over them."""
    places: dict[tuple[str, str], dict[int, list[OwnGroup]]] = defaultdict(lambda: defaultdict(list))
    for one in summaries:
        for group in one.own_groups:
            places[group.kind, group.made][one.rank].append(group)
    places = {place: ranks for place, ranks in places.items() if any(_moves(each) for each in ranks.values())}
    if not places:
        return []
    rows = [("", text) for by_rank in [*places.values()][:MOST] for text in _texts(by_rank)]
    more = [("", f".. made at {len(places) - MOST} more places")] if len(places) > MOST else []
    return [(LABEL, NO_RANKS), *rows, *more]


def _moves(groups: Sequence[OwnGroup]) -> bool:
    """Whether one of them has more ranks than one, as it says itself."""
    return any(group.size != 1 for group in groups)


def _texts(by_rank: dict[int, list[OwnGroup]]) -> list[str]:
    """What rank 0, or the first that has one, says of them."""
    rank, groups = min(by_rank.items())
    others = f", and others on {len(by_rank) - 1} more rank{'s' * (len(by_rank) > 2)}" if len(by_rank) > 1 else ""
    first = f"{own_group_text(groups[0])}: rank {groups[0].place} of it on rank {rank}{others}"
    if len(groups) > 1:
        sizes = ", ".join(f"{one.size} in step {one.step}" for one in groups[1 : 1 + MOST])
        left = f" and {len(groups) - 1 - MOST} times more" if len(groups) > 1 + MOST else ""
        first += f"; made anew of {sizes}{left}"
    calls = sum(one.issued for one in groups)
    moved = _moved(groups)
    if not moved:
        return [first + (f"; {calls} calls, none in a step recorded" if calls else "; no call of it was seen")]
    return [first, *(f"  {text}" for text in moved)]


def _moved(groups: Sequence[OwnGroup]) -> list[str]:
    """Return how much was moved in which steps, by collective and phase."""
    amounts: dict[tuple[str, str, str], dict[int, Counter[str]]] = defaultdict(lambda: defaultdict(Counter))
    for call in (call for group in groups for call in group.calls):
        amounts[call.op, call.phase, call.dtype][call.step].update(calls=call.calls, bytes=call.bytes)
    found = []
    for (op, phase, dtype), by_step in amounts.items():
        alike: dict[tuple[int, int], list[int]] = defaultdict(list)
        for step, amount in sorted(by_step.items()):
            alike[amount["calls"], amount["bytes"]].append(step)
        for (calls, size), steps in alike.items():
            each = " each" if len(steps) > 1 else ""
            when = "" if phase == BACKGROUND else f" in {steps_text(tuple(steps))}{each}"
            found.append(f"{op} in {phase}: {bytes_text(size)} {dtype} in {calls} call{'s' * (calls > 1)}{when}")
    return found
