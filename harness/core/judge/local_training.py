"""Replicas that differ by request, and those of which some parameters are kept equal and others are not.

DDP's communication hook of post-local SGD reduces within subgroups only; parameters are averaged from time to time. A trainer
without hook does the same if it reduces no gradient and averages parameters.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.evidence.keys import ranks_of
from harness.core.evidence.summary import Outside, Summary, Use

LOCAL = re.compile("local_?sgd", re.IGNORECASE)
AVERAGES = "averages of parameters"


def local_by(family: Sequence[Summary]) -> str:
    """Return by what all of these train locally: a hook, or averages of parameters; empty if some rank does not, as far as is
    known."""
    hooks = [next(filter(LOCAL.search, one.hooks), "") for one in family]
    if hooks and all(hooks):
        return hooks[0]
    return AVERAGES if averaged(family) and not _reduces(family) else ""


def _reduces(family: Sequence[Summary]) -> bool:
    """Whether a collective joins some of these in backward."""
    ranks = {one.rank for one in family}
    uses = {use.ranks for one in family for use in one.uses if use.phase == "backward"}
    return any(len(ranks.intersection(ranks_of(key))) > 1 for key in uses)


def averaged(family: Sequence[Summary]) -> tuple[int, ...]:
    """Return the steps after which ranks that differed before hold the same again."""
    steps = sorted(set.intersection(*({step for step in one.contents if step} for one in family)))
    alike = {step: len({one.contents[step] for one in family}) == 1 for step in steps}
    first = next((step for step in steps if not alike[step]), None)
    return tuple(step for step in steps if first is not None and step > first and alike[step])


def not_averaged(families: Iterable[Sequence[Summary]]) -> list[Sequence[Summary]]:
    """Return the families that train locally, differ, and were never equal again: the recording may be too short."""
    local = (family for family in families if local_by(family) and not averaged(family))
    return [family for family in local if any(len({one.contents.get(s) for one in family}) > 1 for s in _steps(family))]


def _steps(family: Iterable[Summary]) -> set[int]:
    return {step for one in family for step in one.contents if step}


@dataclass(frozen=True)
class PartlyEqual:
    """Ranks that began with the same parameters, which claim nothing."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    equal: tuple[str, ...]
    """Parameters that changed, and are equal on all of these ranks; empty if none."""
    differ: tuple[str, ...]
    """Parameters that are not."""


def _sums(family: Sequence[Summary]) -> bool:
    """Whether these add up as much as their parameters have, and not in forward passes, as tensor parallelism does."""
    ranks, moved = {one.rank for one in family}, Counter[str]()
    uses: tuple[Use | Outside, ...] = (*family[0].uses, *family[0].outside)
    for use in uses:
        if use.op in ("all_reduce", "reduce", "reduce_scatter") and len(ranks.intersection(ranks_of(use.ranks))) > 1:
            moved["forward" if use.phase in ("forward", "pipeline") else "later"] += use.bytes
    return not moved["forward"] and moved["later"] >= family[0].memory.get("parameters", 1)


def partly_equal(summaries: Iterable[Summary]) -> list[PartlyEqual]:
    """Return the sets of ranks that began alike and keep some parameters equal, but not all. They may keep none equal if they
    add up as much as gradients are. Stages of a pipeline may begin alike, too, and add up nothing."""
    began: dict[object, list[Summary]] = defaultdict(list)
    for one in summaries:
        if one.unclaimed:
            began[one.model, tuple((fqn, first) for fqn, (first, _) in one.unclaimed.items())].append(one)
    found = []
    for family in began.values():
        held = {fqn: {one.unclaimed[fqn][1] for one in family} for fqn in family[0].unclaimed}
        changed = {fqn for fqn, (first, _) in family[0].unclaimed.items() if held[fqn] != {first}}
        equal = tuple(fqn for fqn in held if len(held[fqn]) == 1 and fqn in changed)
        differ = tuple(fqn for fqn in held if len(held[fqn]) > 1)
        if differ and not averaged(family) and (equal or _sums(family)):
            found.append(PartlyEqual(tuple(sorted(one.rank for one in family)), equal, differ))
    return found
