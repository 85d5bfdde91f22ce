"""Count of the calls of the output layer: one a forward pass, or one for each chunk of a loss.

A chunk that is recomputed counts twice. A trainer declares both in its traits. A loss that multiplies by the weight itself
calls no module.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from harness.core.evidence.step import Call, StepEvidence
from harness.core.judge.finding import Finding
from harness.core.judge.trial import Trial

OUTPUT = "output"
CALLS = "calls"
RECOMPUTATIONS = "recomputations"


def forward_call_count(trial: Trial, rank: int) -> int:
    """Return how often forward passes of a step call the output layer: 0 on all stages but the last."""
    has_last_stage = trial.case.n_stages - 1 in trial.plan.stages[rank]
    return trial.case.passes * trial.traits.loss_chunks * has_last_stage


def recomputation_count(trial: Trial, rank: int) -> int:
    """Return how often backward calls the output layer in a step."""
    return forward_call_count(trial, rank) * trial.traits.recomputes_output


def judge_output_calls(trial: Trial, rank: int, step: StepEvidence) -> Iterator[Finding | None]:
    """Judge the calls of the output layer in forward and in backward. Yield None for a number that is as the traits declare.

    Calls that a compiler hides, or calls after forward, are not counted. On stages before the last a module of that name has
    no weight: it is an Identity.
    """
    forward_calls = step.activity.calls.get(Call("forward", OUTPUT), 0)
    backward_calls = step.activity.calls.get(Call("backward", OUTPUT), 0)
    expected_forward = forward_call_count(trial, rank)
    expected_backward = recomputation_count(trial, rank)
    if forward_calls and expected_forward:
        right = forward_calls == expected_forward
        yield _call_count_finding(right, rank, step, CALLS, "forward", expected_forward, forward_calls)
    if backward_calls or expected_backward:
        right = backward_calls == expected_backward
        yield _call_count_finding(right, rank, step, RECOMPUTATIONS, "backward", expected_backward, backward_calls)


def _call_count_finding(
    right: bool, rank: int, step: StepEvidence, quantity: str, phase: str, expected: int, observed: int
) -> Finding | None:
    if right:
        return None
    subject: dict[str, Any] = {
        "step": step.step,
        "kind": "module",
        "name": OUTPUT,
        "quantity": quantity,
        "phase": phase,
    }
    return Finding.at(rank, expected, observed, **subject)
