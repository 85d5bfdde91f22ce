"""How often the output layer is applied: once a forward pass, or once for each chunk of a loss. A chunk that is recomputed
counts twice. A trainer declares both in its traits. A loss that multiplies by the weight itself calls no module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.evidence.step import Call, StepEvidence
from harness.judge.finding import Finding
from harness.judge.trial import Trial

OUTPUT = "output"


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
        hint = _chunks(trial, forward)
        yield _unless(forward == wanted, rank, step, "calls", "forward", wanted, forward, hint)
    if again or wanted_again:
        yield _unless(
            again == wanted_again, rank, step, "recomputations", "backward", wanted_again, again, _again(again)
        )


def _unless(
    right: bool, rank: int, step: StepEvidence, quantity: str, phase: str, expected: int, observed: int, hint: str
) -> Finding | None:
    what: dict[str, Any] = {
        "step": step.step,
        "kind": "module",
        "name": OUTPUT,
        "quantity": quantity,
        "phase": phase,
        "note": hint,
    }
    return None if right else Finding.at(rank, expected, observed, **what)


def _chunks(trial: Trial, calls: int) -> str:
    each, rest = divmod(calls, trial.case.passes)
    traits = f"loss_chunks={each}, loss_in_forward=True"
    return "" if rest else f"for a loss in chunks, adapter: TrainerTraits({traits})"


def _again(calls: int) -> str:
    return "for a loss that is checkpointed, adapter: TrainerTraits(recomputes_output=True)" if calls else ""
