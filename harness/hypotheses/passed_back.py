"""Backward passes a multiple of the right gradient on to some modules: it is wrong in them, and in all that come before.

The place is that of the last parameters that are wrong, whose gradients are multiples; the checks judge all others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from functools import partial

import numpy as np

from harness.core.causes.assume import another_reference
from harness.core.causes.contributions import KIND, TIED, scaled_alike
from harness.core.causes.differences import expected_gradient, first_wrong_step, seen_gradients, spans, wrong_pairs
from harness.core.causes.factors import factor_text, times_text
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import some
from harness.core.judge.result import Cause
from harness.core.judge.trial import Trial
from harness.hypotheses.backward import depth
from harness.reference.distance import best_fit

ALIKE = 1e-9
"""Relative, in float64: a gradient that is another's multiple is off by no more."""


def multiples_passed_back(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Suppose it of the modules of one layer, or of those that are called so in all layers."""
    step = first_wrong_step(trial) if "gradients" in broken and trial.case.exact else None
    if step is None:
        return
    wrong = {fqn for _, fqn in wrong_pairs(trial, step)}
    tied = wrong == {TIED} and trial.case.model.tied_embeddings
    last = [fqn for fqn in trial.plan.shapes if fqn in wrong and depth(fqn) == max(map(depth, wrong))]
    factor = 0.0 if tied else _factor(trial, step, last)
    if factor is None or (scaled_alike(trial, step) and not tied):
        return
    ends = {fqn.partition(".")[2].partition(".")[2] for fqn in last} - {""}
    named_so = [fqn for fqn in trial.plan.shapes if fqn.partition(".")[2].partition(".")[2] in ends]
    for fqns in dict.fromkeys((tuple(last), tuple(named_so or last))):
        modules = [fqn.removesuffix(".weight") for fqn in fqns]
        for when, steps, more in spans(trial, step):
            if factor and len(steps) < 2:
                continue  # a second step is the test of a factor that was fitted to the first
            cause = _cause(trial, modules, factor, when, steps)
            yield Hypothesis(cause, partial(_assuming, modules=modules, factor=factor, steps=steps), 2 + more)


def _factor(trial: Trial, step: int, fqns: Collection[str]) -> float | None:
    """Return how often all holders have the right gradient of these parameters; None where it is no such multiple."""
    found = []
    for rank, fqn in (pair for pair in wrong_pairs(trial, step) if pair[1] in fqns):
        seen, own = seen_gradients(trial, rank, step)[fqn], expected_gradient(trial, rank, fqn, step)
        if own is None or own.shape != seen.shape or not np.any(own):
            return None
        found.append(best_fit(seen, own))
        if not np.linalg.norm(seen - found[-1] * own) <= ALIKE * np.linalg.norm(own):
            return None
    alike = found and np.allclose(found, found[0], rtol=1e-7, atol=1e-12)
    return float(np.median(found)) if alike else None


def _cause(trial: Trial, modules: Sequence[str], factor: float, when: str, steps: Sequence[int]) -> Cause:
    place = f"the outputs of {some(modules, 4)}{when}"
    details = (("modules", tuple(modules)), ("factor", factor), ("steps", tuple(steps)))
    if abs(factor) < ALIKE:
        lost = f"no gradient comes back to {place}"
        if {f"{module}.weight" for module in modules} == {TIED} and trial.case.model.tied_embeddings:
            lost = f"the embeddings' part of the tied weight's gradient is missing{when}"  # behind them or in them
        return Cause("lost in backward", lost, details=details)
    text = f"gradients that come back to {place} are {times_text(factor)} what they should be"
    return Cause(KIND, text, hint=factor_text(trial, factor, False).removeprefix(": "), details=details)


def _assuming(trial: Trial, modules: Sequence[str], factor: float, steps: Sequence[int]) -> Trial:
    from harness.reference.spellings import passing_back

    return another_reference(trial, altered=passing_back(modules, factor, steps))
