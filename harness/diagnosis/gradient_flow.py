"""The loss of a step is right and gradients are not: backward does something else than forward says."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import numpy as np

from harness.diagnosis.assume import another_reference
from harness.diagnosis.backward import depth
from harness.diagnosis.differences import factor_of, first_wrong_step, loss_off, seen_gradients, wrong_pairs
from harness.diagnosis.forward import Tries
from harness.diagnosis.hypothesis import Broken, Hypothesis
from harness.diagnosis.words import Pair
from harness.judge.contents import take
from harness.judge.tolerance import relative_difference
from harness.judge.trial import Trial

Arrays = dict[str, np.ndarray]
BEFORE = {"samples", "positions", "initial_weights", "resume"}


def other_gradient_flows(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Those that give the gradients observed in the first wrong step, of all parameters that are wrong and of no others."""
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.exact else None
    if step is None or BEFORE & set(broken) or loss_off(trial, step) or trial.references:
        return
    wrong, tries = wrong_pairs(trial, step), Tries(trial, step)
    if not tries.rows or all(factor_of(trial, *at, step) is not None for at in wrong):
        return
    from harness.reference.altered import altering
    from harness.reference.gradient_flow import gradient_flows

    near = partial(_near, deepest=max(depth(fqn)[0] for _, fqn in wrong))
    counts = sorted({2, *(len(groups[0]) for groups in trial.plan.groups.values())} - {1})
    for variation in gradient_flows(counts):
        for modules in filter(near, tries.modules(variation.part)):
            altered = altering(variation, modules, step)
            if _gives(trial, step, tries.bench.gradients(altered), wrong):
                cause = tries.cause(variation, modules, list(tries.rows))
                yield Hypothesis(cause, partial(another_reference, altered=altered))


def _near(modules: list[str], deepest: int) -> bool:
    """Of one block: whether it is the last whose gradients are wrong, or the next, which sends gradients to that one. Other
    blocks leave those right, or make later ones wrong."""
    blocks = {int(name.split(".")[1]) for name in modules if name.startswith("layers.")}
    return len(blocks) != 1 or len(modules) > 1 or blocks <= {deepest, deepest + 1}


def _gives(trial: Trial, step: int, gradients: Arrays, wrong: list[Pair]) -> bool:
    """Gradients that are not there are zero."""
    bound, usual, odd = trial.bounds.gradient[step], trial.reference_step(step).gradients, {fqn for _, fqn in wrong}
    for rank, fqn in wrong:
        part = trial.gradient_slice_of(rank, fqn)
        other = gradients.get(fqn, np.zeros_like(usual[fqn])).reshape(usual[fqn].shape)
        seen, largest = seen_gradients(trial, rank, step)[fqn], float(np.max(np.abs(usual[fqn]), initial=0.0))
        if part is None or not relative_difference(seen, take(other, part), largest) <= 4 * bound:
            return False
    others = (fqn for fqn in usual if fqn not in odd)
    return all(
        fqn in gradients and relative_difference(gradients[fqn].ravel(), usual[fqn].ravel()) <= 4 * bound
        for fqn in others
    )
