"""Gradients of slices that tp cuts, summed over tp all the same: a reduction over the ranks of all axes does that."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np

from harness.diagnosis.assume import another_reference
from harness.diagnosis.differences import expected_gradient, first_wrong_step, seen_gradients, wrong_pairs
from harness.diagnosis.factors import times_text
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import Arrays, Pair, in_order, in_parameters
from harness.judge.contents import take
from harness.judge.result import Cause
from harness.judge.tolerance import relative_difference
from harness.judge.trial import Trial
from harness.reference.distance import best_fit


def mixed_slices(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Every rank of a tp group has one multiple of the sum of what its peers should have, each of another slice."""
    tp = trial.case.dims.tp
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.exact and tp > 1 else None
    wrong = wrong_pairs(trial, step) if step is not None else []
    if step is None or not wrong:
        return
    factors = [_times(trial, at, step) for at in wrong]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors) or not np.allclose(known, known[0], rtol=1e-7):
        return
    fqns, factor = in_order(trial, (fqn for _, fqn in wrong)), float(np.median(known))
    times = {1.0: "the sum", 1 / tp: "the mean"}.get(round(factor, 9), f"{times_text(factor)} the sum")
    text = f"gradients are also reduced over tp, whose ranks hold different slices: each has {times} of all"
    cause = Cause("slices mixed", text, in_parameters(trial, fqns))
    change = partial(_mixed, trial=trial, fqns=fqns, factor=factor, since=step)
    yield Hypothesis(cause, partial(another_reference, gradients=change)).and_then(_moved_besides)


def _moved_besides(trial: Trial) -> Trial:
    """All gradients once, when backward is over."""
    records = {rank: evidence.steps[0].gradients.values() for rank, evidence in trial.ranks.items() if evidence.steps}
    besides = {rank: sum(gradient.nbytes for gradient in seen) for rank, seen in records.items()}
    most = {rank: trial.plan.outside_bytes[rank] + besides.get(rank, 0) for rank in trial.ranks}
    return replace(trial, plan=replace(trial.plan, outside_bytes=most))


def _times(trial: Trial, at: Pair, step: int) -> float | None:
    """Of the sum of what its tp group should have of a parameter; None where that is not what a rank has."""
    rank, fqn = at
    seen = seen_gradients(trial, rank, step)[fqn]
    expected = [expected_gradient(trial, peer, fqn, step) for peer in trial.plan.peers(rank, "tp")]
    parts = [part for part in expected if part is not None and part.shape == seen.shape]
    if len(parts) < len(expected) or not np.any(seen):
        return None
    total = np.sum(parts, axis=0)
    factor = best_fit(seen, total)
    return factor if relative_difference(seen, factor * total) < 1e-9 else None


def _mixed(
    step: int, gradients: Arrays, *, trial: Trial, fqns: Sequence[str], factor: float, since: int
) -> dict[str, np.ndarray]:
    if step < since:
        return dict(gradients)
    changed = {fqn: gradients[fqn].copy() for fqn in fqns}
    for fqn in fqns:
        for rank in trial.ranks:
            parts = [trial.gradient_slice_of(peer, fqn) for peer in trial.plan.peers(rank, "tp")]
            total = np.sum([take(gradients[fqn], part) for part in parts if part is not None], axis=0)
            if (own := trial.gradient_slice_of(rank, fqn)) is not None:
                take(changed[fqn], own)[...] = factor * total
    return {**gradients, **changed}
