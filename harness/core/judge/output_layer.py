"""The number of calls of the output layer: one for each forward pass, or one for each chunk of a loss.

A chunk that is recomputed is called in backward, too. A trainer declares both in its traits. A loss that multiplies by
the weight itself calls no module.
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
    """Return how often forward of a step should call the output layer. 0 on all stages but the last."""
    has_last_stage = trial.case.n_stages - 1 in trial.plan.stages[rank]
    return trial.case.passes * trial.traits.loss_chunks * has_last_stage


def recomputation_count(trial: Trial, rank: int) -> int:
    """Return how often backward of a step should call the output layer: as in forward if it is recomputed, else 0."""
    return forward_call_count(trial, rank) * trial.traits.recomputes_output


def judge_output_calls(trial: Trial, rank: int, step: StepEvidence) -> Iterator[Finding | None]:
    """Judge the output layer's calls in forward and in backward: yield a finding, or None for a right number.

    Forward's number is judged only where a call was seen, because a compiler may hide calls and a loss may come after
    forward. On stages before the last a module of that name has no weight (an Identity), so its forward calls are not
    judged.
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
    """Return the finding that a rank called the output layer another number of times than expected. None if `right`."""
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
