"""Causes of gradients that are summed over groups of no axis, in place of an axis' own.

Traffic shows them, weights confirm them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from harness.core.causes.contributions import AssumeInSteps, Interpretation
from harness.core.causes.pieces import FittedWeights, assume_piece_weights
from harness.core.causes.words import groups_text
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank
from harness.hypotheses.backward import silent_axes, unplanned_groups

Groups = tuple[tuple[int, ...], ...]


def summed_over_others(fit: FittedWeights) -> Iterator[Interpretation]:
    """Yield readings that gradients were summed over groups of no axis, in place of dp_replicate's or dp_shard's own.

    Each piece counts where a rank of the group received it, as a mean over the group or over the axis. Nothing unless
    traffic shows such groups, and the fitted weights agree.
    """
    trial = fit.trial
    pieces = fit.pieces
    zeros = np.zeros(len(fit.pieces.all))
    for axis, op in silent_axes(trial, fit.step).items():
        groups = _groups_within_axis(trial, axis, tuple(sorted(unplanned_groups(trial, op))))
        if not groups or axis not in ("dp_replicate", "dp_shard"):
            continue
        coordinates = pieces.mesh_coordinates((axis,))[:, 0]
        counted_pieces = dict[int, np.ndarray]()
        for group in groups:
            members = [coordinate_of_rank(trial.case.dims, rank)[axis] for rank in group]
            counted_pieces |= dict.fromkeys(group, np.isin(coordinates, members).astype(float))
        usual_factors = sorted({1.0} | {len(trial.plan.group_of(group[0], axis)) / len(group) for group in groups})
        without = lambda step, rank: zeros  # noqa: E731
        counted = lambda step, rank, counted_pieces=counted_pieces: counted_pieces[rank]  # noqa: E731
        factor = fit.fit_factor(without, counted, usual_factors)
        if factor is None:
            continue
        text = f"gradients are reduced over {groups_text(groups)}, not over {axis}"
        details = (("axes", (axis,)), ("groups", groups), ("factor", factor))
        cause = Cause("gradients not reduced", text, expected=groups_text(trial.plan.groups[axis]), details=details)
        weights = lambda step, rank, counted_pieces=counted_pieces, factor=factor: factor * counted_pieces[rank]  # noqa: E731
        assume_weights = partial(assume_piece_weights, pieces=pieces, fqns=fit.fqns, weights=weights)
        yield Interpretation(
            cause, fit.fqns, _assume_groups(assume_weights, axis, groups), least_steps=1 + (factor not in usual_factors)
        )


def _groups_within_axis(trial: Trial, axis: str, groups: Groups) -> Groups:
    """Return the groups if they are a partition of all ranks, each within one group of the axis. Empty if they are not."""
    ranks = sorted(itertools.chain.from_iterable(groups))
    are_inside = all({*group} <= {*trial.plan.group_of(group[0], axis)} for group in groups)
    return groups if are_inside and ranks == sorted(trial.ranks) else ()


def _assume_groups(assume_weights: Callable[..., Trial], axis: str, groups: Groups) -> AssumeInSteps:
    """Return a function of steps that gives the assumption: these weights, and these groups as those of the axis in
    the plan."""

    def assume_both(trial: Trial, steps: Sequence[int]) -> Trial:
        assumed = assume_weights(trial, steps=steps)
        planned: Mapping[str, Groups] = {**assumed.plan.groups, axis: groups}
        return replace(assumed, plan=replace(assumed.plan, groups=dict(planned)))

    return lambda steps: partial(assume_both, steps=steps)
