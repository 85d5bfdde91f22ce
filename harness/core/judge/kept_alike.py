"""Replicas that their optimizer keeps alike, as Dion does: its step moves what it needs, and no gradient is reduced."""

from __future__ import annotations

from harness.core.judge.trial import Trial


def moves_in_step(trial: Trial, rank: int, step: int, group: tuple[int, ...]) -> int:
    """Return the bytes that this rank moved over all of the group in the optimizer's step."""
    calls = trial.ranks[rank].collectives
    return sum(c.bytes for c in calls if (c.step, c.phase) == (step, "optimizer") and c.ranks == group)


def joined_in_step(trial: Trial, rank: int, group: tuple[int, ...]) -> bool:
    """Return whether the optimizer joins replicas that nothing claims: whether it leaves them alike is another question."""
    return "declared" not in trial.provided and any(
        moves_in_step(trial, rank, step, group) for step in trial.case.steps
    )


def first_difference(trial: Trial, group: tuple[int, ...]) -> int | None:
    """Return the first step after which these ranks hold other bytes, 0 if none; None if that was not read, or none trained."""
    contents = [one.contents for one in trial.glances if one.rank in group]
    if len(contents) < len(group) or not all(set(one) - {0} for one in contents):
        return None
    steps = sorted(set.union(*map(set, contents)) - {0})
    if all(len({one.get(step) for step in (0, *steps)}) == 1 for one in contents):
        return None
    return next((step for step in steps if len({one.get(step) for one in contents}) > 1), 0)
