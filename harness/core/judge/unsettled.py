"""The additional bytes that a rank holds and moves while gradients of DTensors are partial: clipping and optimizer sum them."""

from __future__ import annotations

from collections import Counter

from harness.core.evidence.step import StepEvidence
from harness.core.evidence.unsettled import ranks_of_partial_sum
from harness.core.judge.traffic import TrafficKey
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE

GRADIENT_READS = {"adamw": 3, "sgd": 1, "muon": 3}
"""Operators of an optimizer's step that read a gradient: DTensor sums a partial one for each. AdamW reads it once for the first
moment, and as both factors of its square for the second."""
CLIPPING_READS = 1
"""Operators of clipping that read a gradient and need its sum."""


def partial_gradient_bytes(step: StepEvidence) -> int:
    """Return the bytes that a rank's gradients take in a step in addition to those that they take once summed.

    0 if all lie as their parameters do.
    """
    return sum(max(gradient.bytes - gradient.settled_bytes, 0) for gradient in step.unsettled.values())


def partial_sum_bytes(trial: Trial, rank: int, number: int) -> dict[TrafficKey, int]:
    """Return, by (ranks, op, phase), the most bytes that sums of a step's partial gradients move outside of its passes.

    Each operator of clipping and optimizer that reads such a gradient may sum it again.
    """
    largest_bytes = Counter[TrafficKey]()
    reads = CLIPPING_READS + GRADIENT_READS[trial.case.training.optimizer]
    for step in trial.ranks[rank].steps:
        if step.step != number:
            continue
        for gradient in step.unsettled.values():
            ranks = tuple(ranks_of_partial_sum(gradient, rank))
            # A group of one rank sums nothing: its entry is 0.
            largest_bytes[ranks, "all_reduce", OUTSIDE] += reads * gradient.bytes if len(ranks) > 1 else 0
    return dict(largest_bytes)
