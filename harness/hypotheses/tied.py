"""Causes about copies of a tied embedding on two stages of a pipeline, whose gradients nothing adds up before clipping.

The reference is trained with a separate output that starts as the embedding does. Ranks of the last stage are judged by
the output, all others by the embedding. The copies train separately, or by the sum of both gradients as they are after
clipping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from harness.core.causes.assume import retrain
from harness.core.causes.contributions import TIED_FQN
from harness.core.causes.differences import first_wrong_step, pairs_with_wrong_gradient
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import Arrays
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.held_values import reference_order_arguments
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import tied_axis
from harness.reference.record import ReferenceRun, ReferenceStep

T = TypeVar("T")
OUTPUT = "output.weight"
NORM_CHOICES = {
    "": (OUTPUT,),
    "the norm counts the last stage's copy alone": (TIED_FQN,),
    "the norm counts both copies": (),
}
"""Words for which of the two copies the norm counts -> the parameters that it leaves out."""


def copies_trained_apart(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Yield hypotheses that nothing adds up the copies' gradients from step 1 on, or that only clipped ones are added up.

    Both are yielded for each of NORM_CHOICES. Nothing unless stages hold copies, gradients are wrong in step 1, and only
    TIED_FQN's are. Nothing if something else is assumed already.
    """
    axis = tied_axis(trial.case)
    if not axis or "gradients" not in broken or first_wrong_step(trial) != 1 or trial.assumption.references:
        return
    if {fqn for _, fqn in pairs_with_wrong_gradient(trial, 1)} != {TIED_FQN} or {*trial.assumption.reference}:
        return
    text = (
        f"the gradients of {TIED_FQN} are not summed over first and last stage: each steps its copy by its own gradient"
    )
    for hint, left_out in NORM_CHOICES.items():
        cause = Cause(
            "gradients not reduced", text, hint=hint, details=(("axes", (axis,)), ("parameters", (TIED_FQN,)))
        )
        yield Hypothesis(
            cause, partial(_assume_separate_copies, axis=axis, left_out=left_out), fitted_count=1 + bool(hint)
        )
        late_text = f"the gradients of {TIED_FQN} are summed over first and last stage only after clipping"
        summed_late = replace(cause, observed=late_text)
        yield Hypothesis(
            summed_late,
            partial(_assume_separate_copies, axis=axis, left_out=left_out, is_late=True),
            fitted_count=2 + bool(hint),
        )


def _assume_separate_copies(trial: Trial, axis: str, left_out: tuple[str, ...], *, is_late: bool = False) -> Trial:
    """Return the trial under the assumption that both copies train separately, each rank with the reference of its
    copy.

    axis: over which copies would be summed. left_out: parameters that the norm does not count. is_late: copies are
    stepped by the sum of clipped gradients.
    """
    limit = trial.case.training.max_norm
    model = replace(trial.case.model, tied_embeddings=False)

    def clip_gradients(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        clip = clip_coefficient(_counted_norm(gradients, left_out), limit)
        summed = dict.fromkeys((TIED_FQN, OUTPUT), gradients[TIED_FQN] + gradients[OUTPUT]) if is_late else {}
        return {fqn: (clip * g).astype(g.dtype) for fqn, g in {**gradients, **summed}.items()}

    separate = replace(trial.reference, weights={**trial.reference.weights, OUTPUT: trial.reference.weights[TIED_FQN]})
    trained = retrain(model, trial.case.training, separate, given=clip_gradients, **reference_order_arguments(trial))
    norms = {step.step: _counted_norm(step.gradients, left_out) for step in trained.steps}
    first = _run_with_copy(trial.reference, trained, norms, TIED_FQN)
    last = _run_with_copy(trial.reference, trained, norms, OUTPUT)

    def clip_peer_sum(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        others = _peer_gradients(trial, rank, axis, step) if is_late and fqn == TIED_FQN else []
        return clip_coefficient(norms[step], limit) * sum(others, gradient)

    unreduced = frozenset((axis, step) for step in trial.case.steps if not is_late)
    changed = replace(trial, reference=first, plan=replace(trial.plan, unreduced=trial.plan.unreduced | unreduced))
    return changed.with_assumption(
        AssumedOptimizer(given=clip_peer_sum), references=dict.fromkeys(last_stage_ranks(trial), last), apart=True
    )


def _peer_gradients(trial: Trial, rank: int, axis: str, step: int) -> list[np.ndarray]:
    """Return the observed gradients that other ranks along the axis have of their copies. float64; empty if none is
    on record."""
    gradients = []
    for peer in trial.plan.peers(rank, axis):
        if peer == rank or peer not in trial.ranks:
            continue
        for record in trial.ranks[peer].steps:
            if record.step == step and TIED_FQN in record.gradients:
                gradients.append(record.gradients[TIED_FQN].astype(np.float64))
    return gradients


def _counted_norm(gradients: Arrays, left_out: tuple[str, ...]) -> float:
    """Return the norm of all gradients but those of the parameters that are left out. gradients: fqn -> gradient."""
    counted = (gradient for fqn, gradient in gradients.items() if fqn not in left_out)
    squares = (float(np.sum(np.square(gradient, dtype=np.float64))) for gradient in counted)
    return float(np.sqrt(sum(squares)))


def _run_with_copy(reference: ReferenceRun, trained: ReferenceRun, norms: dict[int, float], fqn: str) -> ReferenceRun:
    """Return the run as seen by a rank that has this copy of the weight, under the embedding's name."""

    def with_own_copy(values: dict[str, T]) -> dict[str, T]:
        return {name: values[fqn if name == TIED_FQN else name] for name in reference.weights if name in values}

    def step_with_own_copy(step: ReferenceStep) -> ReferenceStep:
        return replace(
            step,
            grad_norm=norms[step.step],
            gradients=with_own_copy(step.gradients),
            parameters=with_own_copy(step.parameters),
            optimizer_state=with_own_copy(step.optimizer_state),
        )

    return replace(trained, weights=reference.weights, steps=tuple(map(step_with_own_copy, trained.steps)))
