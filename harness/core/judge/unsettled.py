"""What a rank holds and moves more while a DTensor's gradients are not settled: clipping and the optimizer do that."""

from __future__ import annotations

from collections import Counter

from harness.core.evidence.step import StepEvidence
from harness.core.evidence.unsettled import partial_ranks
from harness.core.judge.traffic import Key
from harness.core.judge.trial import Trial
from harness.core.plan.traffic.flow import OUTSIDE

READS = {"adamw": 3, "sgd": 1, "muon": 3}
"""Operators of an optimizer's step that read a gradient: DTensor sums a partial one for each. AdamW reads it once for the first
moment, and as both factors of its square for the second."""
NORM = 1
"""Operators of clipping that read a gradient and need its sum."""


def unsettled_bytes(step: StepEvidence) -> int:
    """Return the bytes that a rank's gradients take in addition to its slices."""
    return sum(max(lies.bytes - lies.settled_bytes, 0) for lies in step.unsettled.values())


def settling_bytes(trial: Trial, rank: int, number: int) -> dict[Key, int]:
    """Return, by collective, the most bytes that the sums of a step's partial gradients take."""
    most = Counter[Key]()
    times = NORM + READS[trial.case.training.optimizer]
    for step in trial.ranks[rank].steps:
        for lies in step.unsettled.values() if step.step == number else ():
            ranks = tuple(partial_ranks(lies, rank))
            most[ranks, "all_reduce", OUTSIDE] += times * lies.bytes * (len(ranks) > 1)
    return dict(most)
