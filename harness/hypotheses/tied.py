"""A tied embedding of which two stages of a pipeline have a copy each, whose gradients nothing adds up before clipping.

The reference is trained with a separate output that starts as the embedding does. Ranks of the last stage are judged by the
output, all others by the embedding. The copies train separately, or by the sum of both gradients as they are after clipping.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TypeVar

import numpy as np

from harness.core.causes.assume import retrain
from harness.core.causes.contributions import TIED
from harness.core.causes.differences import first_wrong_step, wrong_pairs
from harness.core.causes.hypothesis import Broken, Hypothesis
from harness.core.causes.words import Arrays
from harness.core.judge.assumed import AssumedOptimizer
from harness.core.judge.held_values import order_of_entries
from harness.core.judge.places import last_stage_ranks
from harness.core.judge.result import Cause
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.plan.grid import tied_axis
from harness.reference.record import ReferenceRun, ReferenceStep

T = TypeVar("T")
OUTPUT = "output.weight"
COUNTED = {"": (OUTPUT,), "the norm counts the last stage's copy alone": (TIED,), "the norm counts both copies": ()}
"""What the norm may count of two copies, in words, and what it then leaves out."""


def copies_trained_apart(trial: Trial, broken: Broken) -> Iterator[Hypothesis]:
    """Suppose that nothing adds up their gradients, from the first step on, or only what is clipped."""
    axis = tied_axis(trial.case)
    if not axis or "gradients" not in broken or first_wrong_step(trial) != 1 or trial.assumption.references:
        return
    if {fqn for _, fqn in wrong_pairs(trial, 1)} != {TIED} or {*trial.assumption.reference}:
        return
    text = f"the gradients of {TIED} are not summed over first and last stage: each steps its copy by its own gradient"
    for hint, left_out in COUNTED.items():
        cause = Cause("gradients not reduced", text, hint=hint, details=(("axes", (axis,)), ("parameters", (TIED,))))
        yield Hypothesis(cause, partial(_apart, axis=axis, left_out=left_out), fitted=1 + bool(hint))
        late = replace(
            cause, observed=f"the gradients of {TIED} are summed over first and last stage only after clipping"
        )
        yield Hypothesis(late, partial(_apart, axis=axis, left_out=left_out, late=True), fitted=2 + bool(hint))


def _apart(trial: Trial, axis: str, left_out: tuple[str, ...], *, late: bool = False) -> Trial:
    """left_out: of the norm. late: the sum is made of clipped gradients."""
    limit, model = trial.case.training.max_norm, replace(trial.case.model, tied_embeddings=False)

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        clip = clip_coefficient(_norm(gradients, left_out), limit)
        summed = dict.fromkeys((TIED, OUTPUT), gradients[TIED] + gradients[OUTPUT]) if late else {}
        return {fqn: (clip * g).astype(g.dtype) for fqn, g in {**gradients, **summed}.items()}

    both = replace(trial.reference, weights={**trial.reference.weights, OUTPUT: trial.reference.weights[TIED]})
    ran = retrain(model, trial.case.training, both, given=given, **order_of_entries(trial))
    norms = {step.step: _norm(step.gradients, left_out) for step in ran.steps}
    first, last = (_one_copy(trial.reference, ran, norms, fqn) for fqn in (TIED, OUTPUT))

    def clipped(rank: int, step: int, fqn: str, gradient: np.ndarray) -> np.ndarray:
        others = _of_peers(trial, rank, axis, step) if late and fqn == TIED else []
        return clip_coefficient(norms[step], limit) * sum(others, gradient)

    left = frozenset((axis, step) for step in trial.case.steps if not late)
    moved = replace(trial, reference=first, plan=replace(trial.plan, unreduced=trial.plan.unreduced | left))
    return moved.assuming(
        AssumedOptimizer(given=clipped), references=dict.fromkeys(last_stage_ranks(trial), last), apart=True
    )


def _of_peers(trial: Trial, rank: int, axis: str, step: int) -> list[np.ndarray]:
    """The gradients of the other copies, as seen."""
    peers = [peer for peer in trial.plan.peers(rank, axis) if peer != rank and peer in trial.ranks]
    records = (record for peer in peers for record in trial.ranks[peer].steps if record.step == step)
    return [record.gradients[TIED].astype(np.float64) for record in records if TIED in record.gradients]


def _norm(gradients: Arrays, left_out: tuple[str, ...]) -> float:
    squares = (float(np.sum(np.square(g, dtype=np.float64))) for fqn, g in gradients.items() if fqn not in left_out)
    return float(np.sqrt(sum(squares)))


def _one_copy(reference: ReferenceRun, ran: ReferenceRun, norms: dict[int, float], fqn: str) -> ReferenceRun:
    """Return the run as a rank sees it that has this copy of the weight, under the embedding's name."""

    def of(values: dict[str, T]) -> dict[str, T]:
        return {name: values[fqn if name == TIED else name] for name in reference.weights if name in values}

    def step(one: ReferenceStep) -> ReferenceStep:
        gradients, parameters, state = of(one.gradients), of(one.parameters), of(one.optimizer_state)
        norm = norms[one.step]
        return replace(one, grad_norm=norm, gradients=gradients, parameters=parameters, optimizer_state=state)

    return replace(ran, weights=reference.weights, steps=tuple(map(step, ran.steps)))
