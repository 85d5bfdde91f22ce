"""Replicas that an optimizer such as Dion keeps equal: its step moves bytes, and no gradient is reduced."""

from __future__ import annotations

from collections.abc import Mapping

from harness.core.judge.trial import Trial


def optimizer_bytes_over_group(trial: Trial, rank: int, step: int, group: tuple[int, ...]) -> int:
    """Return the bytes of this rank's collectives over exactly these ranks in a step's optimizer phase. 0 if none."""
    calls = trial.ranks[rank].collectives
    return sum(call.bytes for call in calls if (call.step, call.phase) == (step, "optimizer") and call.ranks == group)


def optimizer_joins_group(trial: Trial, rank: int, group: tuple[int, ...]) -> bool:
    """Return whether this rank's optimizer moves bytes over exactly this group in some step.

    False if the case is complete, as it then says what is moved. The bytes alone do not show whether the optimizer
    leaves the replicas equal.
    """
    return not trial.case.is_complete and any(
        optimizer_bytes_over_group(trial, rank, step, group) for step in trial.case.steps
    )


def first_differing_step(trial: Trial, group: tuple[int, ...]) -> int | None:
    """Return the first step after which the digests of these ranks' parameters differ. 0 if none differ.

    A rank that lacks a step on record differs in it. None if a rank has no digests, or if no rank's parameters ever
    changed.
    """
    digests_by_step = [summary.contents.by_step for summary in trial.rank_summaries if summary.rank in group]
    if len(digests_by_step) < len(group) or not all(set(digests) - {0} for digests in digests_by_step):
        return None
    steps = sorted(set.union(*map(set, digests_by_step)) - {0})

    def is_constant(digests: Mapping[int, object]) -> bool:
        return len({digests.get(step) for step in (0, *steps)}) == 1

    if all(is_constant(digests) for digests in digests_by_step):
        return None
    for step in steps:
        if len({digests.get(step) for digests in digests_by_step}) > 1:
            return step
    return 0
