"""Local training, by request: replicas that differ, and replicas of which only some parameters are kept equal.

DDP's communication hook of post-local SGD reduces within subgroups only; parameters are averaged from time to time. A
trainer without hook does the same if it reduces no gradient and averages parameters.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from harness.core.evidence.keys import ranks_from_key
from harness.core.evidence.summary import Summary
from harness.core.evidence.summary_parts import Outside, Use

LOCAL_HOOK_NAME = re.compile("local_?sgd", re.IGNORECASE)
AVERAGES = "averages of parameters"


def local_training_means(family: Sequence[Summary]) -> str:
    """Return the means by which all of these ranks train locally: the name of a hook, or AVERAGES.

    AVERAGES: they became equal again after a step, and no collective of backward joins two of them. Empty if neither
    was observed.
    """
    hooks = [next(filter(LOCAL_HOOK_NAME.search, summary.modules.hooks), "") for summary in family]
    if hooks and all(hooks):
        return hooks[0]
    return AVERAGES if averaging_steps(family) and not _reduces_in_backward(family) else ""


def _reduces_in_backward(family: Sequence[Summary]) -> bool:
    """Return whether a collective of backward joins at least two of these ranks."""
    ranks = {summary.rank for summary in family}
    groups: set[str] = set()
    for summary in family:
        groups.update(use.ranks for use in summary.traffic.uses if use.phase == "backward")
    return any(len(ranks.intersection(ranks_from_key(group))) > 1 for group in groups)


def averaging_steps(family: Sequence[Summary]) -> tuple[int, ...]:
    """Return the steps, ascending, after which these ranks hold equal parameters although they had differed before.

    Only steps that all have on record count. Empty if they never differed, or were never equal again.
    """
    common_steps = sorted(set.intersection(*map(_steps_of, family)))
    equal_steps = set()
    for step in common_steps:
        digests = {summary.contents.by_step[step] for summary in family}
        if len(digests) == 1:
            equal_steps.add(step)
    first_unequal = next((step for step in common_steps if step not in equal_steps), None)
    if first_unequal is None:
        return ()
    return tuple(step for step in common_steps if step > first_unequal and step in equal_steps)


def never_averaged_families(families: Iterable[Sequence[Summary]]) -> list[Sequence[Summary]]:
    """Return the families whose hook trains locally, that differ, and that were never equal again.

    Their recording may be too short.
    """
    return [
        family
        for family in families
        if local_training_means(family) and not averaging_steps(family) and _differs(family)
    ]


def _differs(family: Sequence[Summary]) -> bool:
    """Return whether the contents of these ranks differ after some step. A rank without the step counts as different."""
    steps = set[int]().union(*map(_steps_of, family))
    for step in steps:
        digests = {summary.contents.by_step.get(step) for summary in family}
        if len(digests) > 1:
            return True
    return False


def _steps_of(summary: Summary) -> set[int]:
    """Return the steps after which a rank's contents are known, without 0, which stands for the start."""
    return {step for step in summary.contents.by_step if step}


@dataclass(frozen=True)
class PartlyEqual:
    """Ranks that began with the same parameters, claim no placement, and keep only some of the parameters equal."""

    ranks: tuple[int, ...]
    """Global ranks, ascending."""
    equal: tuple[str, ...]
    """Parameters that changed, and are equal on all of these ranks; empty if none."""
    differ: tuple[str, ...]
    """Parameters that differ between some of these ranks."""


def _sums_like_gradients(family: Sequence[Summary]) -> bool:
    """Return whether the first rank sums at least the bytes of its parameters with others, and none in forward.

    Tensor parallelism sums in forward, too.
    """
    ranks = {summary.rank for summary in family}
    forward_bytes = 0
    later_bytes = 0
    uses: tuple[Use | Outside, ...] = (*family[0].traffic.uses, *family[0].traffic.outside)
    for use in uses:
        if (
            use.op in ("all_reduce", "reduce", "reduce_scatter")
            and len(ranks.intersection(ranks_from_key(use.ranks))) > 1
        ):
            if use.phase in ("forward", "pipeline"):
                forward_bytes += use.bytes
            else:
                later_bytes += use.bytes
    return not forward_bytes and later_bytes >= family[0].resources.memory.get("parameters", 1)


def find_partly_equal(summaries: Iterable[Summary]) -> list[PartlyEqual]:
    """Return the sets of ranks that began with equal unclaimed parameters and keep only some of them equal.

    A set with none equal is returned only if it sums as many bytes as gradients have: stages of a pipeline may begin
    with equal parameters, too, and sum nothing. Sets that are averaged are left out.
    """
    families: dict[object, list[Summary]] = defaultdict(list)
    for summary in summaries:
        if summary.contents.unclaimed:
            first_digests = tuple((fqn, first) for fqn, (first, _) in summary.contents.unclaimed.items())
            families[summary.parameters.model, first_digests].append(summary)
    partly_equal_sets = []
    for family in families.values():
        last_digests: dict[str, set[int]] = {}
        for fqn in family[0].contents.unclaimed:
            last_digests[fqn] = {summary.contents.unclaimed[fqn][1] for summary in family}
        changed = {fqn for fqn, (first, _) in family[0].contents.unclaimed.items() if last_digests[fqn] != {first}}
        equal = tuple(fqn for fqn, digests in last_digests.items() if len(digests) == 1 and fqn in changed)
        differ = tuple(fqn for fqn, digests in last_digests.items() if len(digests) > 1)
        if differ and not averaging_steps(family) and (equal or _sums_like_gradients(family)):
            ranks = tuple(sorted(summary.rank for summary in family))
            partly_equal_sets.append(PartlyEqual(ranks, equal, differ))
    return partly_equal_sets
