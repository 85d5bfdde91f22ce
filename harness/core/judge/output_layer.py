"""How often the output layer is applied: once a forward pass, or once for each chunk of a loss. A chunk that is recomputed
counts twice. A trainer declares both in its traits. A loss that multiplies by the weight itself calls no module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.core.evidence.step import Call, StepEvidence
from harness.core.judge.finding import Finding
from harness.core.judge.trial import Trial

OUTPUT = "output"
CALLS, CALLED_AGAIN = "calls", "recomputations"


def applied(trial: Trial, rank: int) -> int:
    """Return how often forward passes of a step apply it, on the last stage."""
    return trial.case.passes * trial.traits.loss_chunks * (trial.case.n_stages - 1 in trial.plan.stages[rank])


def applied_again(trial: Trial, rank: int) -> int:
    """Return how often backward applies it."""
    return applied(trial, rank) * trial.traits.recomputes_output


def looked_at(trial: Trial, rank: int, step: StepEvidence) -> Iterator[Finding | None]:
    """None for what is as the traits say. Calls that a compiler hides, or behind forward, are not counted. On other stages
    than the last a module of that name has no weight: it is an Identity."""
    forward, again = (step.activity.calls.get(Call(phase, OUTPUT), 0) for phase in ("forward", "backward"))
    wanted, wanted_again = applied(trial, rank), applied_again(trial, rank)
    if forward and wanted:
        yield _unless(forward == wanted, rank, step, CALLS, "forward", wanted, forward)
    if again or wanted_again:
        yield _unless(again == wanted_again, rank, step, CALLED_AGAIN, "backward", wanted_again, again)


def _unless(
    right: bool, rank: int, step: StepEvidence, quantity: str, phase: str, expected: int, observed: int
) -> Finding | None:
    what: dict[str, Any] = {
        "step": step.step,
        "kind": "module",
        "name": OUTPUT,
        "quantity": quantity,
        "phase": phase,
    }
    return None if right else Finding.at(rank, expected, observed, **what)
