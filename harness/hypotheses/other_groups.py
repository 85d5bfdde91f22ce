"""Gradients that are summed over groups of no axis, in place of an axis' own: what ran shows them, weights confirm them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from harness.core.causes.contributions import Assume, Reading
from harness.core.causes.pieces import Fit, assuming
from harness.core.causes.words import groups_text
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate
from harness.hypotheses.backward import groups_of_no_axis, silent_axes

Groups = tuple[tuple[int, ...], ...]


def summed_over_others(fit: Fit) -> Iterator[Reading]:
    """Read sums of what the ranks of such a group received, as a mean over the group or over the axis."""
    trial, pieces, none = fit.trial, fit.pieces, np.zeros(len(fit.pieces.all))
    for axis, op in silent_axes(trial, fit.step).items():
        groups = _within(trial, axis, tuple(sorted(groups_of_no_axis(trial, op))))
        if not groups or axis not in ("dp_replicate", "dp_shard"):
            continue
        places, own = pieces.places((axis,))[:, 0], dict[int, np.ndarray]()
        for group in groups:
            members = [coordinate(trial.case.dims, rank)[axis] for rank in group]
            own |= dict.fromkeys(group, np.isin(places, members).astype(float))
        known = sorted({1.0} | {len(trial.plan.group_of(group[0], axis)) / len(group) for group in groups})
        times = fit.factor(lambda step, rank: none, lambda step, rank, own=own: own[rank], known)  # type: ignore[misc]
        if times is None:
            continue
        text = f"gradients are reduced over {groups_text(groups)}, not over {axis}"
        details = (("axes", (axis,)), ("groups", groups), ("factor", times))
        cause = Cause("gradients not reduced", text, expected=groups_text(trial.plan.groups[axis]), details=details)
        weights = lambda step, rank, own=own, times=times: times * own[rank]  # noqa: E731
        under = partial(assuming, pieces=pieces, fqns=fit.fqns, weights=weights)
        yield Reading(cause, fit.fqns, _assume(under, axis, groups), least=1 + (times not in known))


def _within(trial: Trial, axis: str, groups: Groups) -> Groups:
    """Return the groups if they are a partition of all ranks, each within one group of the axis; else none."""
    ranks = sorted(rank for group in groups for rank in group)
    inside = all({*group} <= {*trial.plan.group_of(group[0], axis)} for group in groups)
    return groups if inside and ranks == sorted(trial.ranks) else ()


def _assume(under: Callable[..., Trial], axis: str, groups: Groups) -> Assume:
    """Assume in addition that these were the groups of the axis: of the plan, and of what is to move."""

    def both(trial: Trial, steps: Sequence[int]) -> Trial:
        then = under(trial, steps=steps)
        planned: Mapping[str, Groups] = {**then.plan.groups, axis: groups}
        return replace(then, plan=replace(then.plan, groups=dict(planned)))

    return lambda steps: partial(both, steps=steps)
