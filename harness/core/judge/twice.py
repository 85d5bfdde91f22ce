"""The first difference between two runs of the same launch.

On one machine, the same code must give the same numbers.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from harness.core.evidence.records import RankEvidence, Run
from harness.core.evidence.step import StepEvidence


@dataclass(frozen=True)
class FirstDifference:
    """The first step in which numbers of two runs differ, and in it the first kind of number."""

    step: int
    """Number of the step."""
    quantity: str
    """Kind of number: one of QUANTITIES_IN_ORDER."""
    names: tuple[str, ...]
    """Names of the tensors, in the order of the model; of a collective what it is, and in which phase."""
    ranks: tuple[int, ...]
    """Ranks on which they differ."""


PASSED_IN_FORWARD = "what is passed in forward"
PASSED_IN_BACKWARD = "what is passed in backward"
QUANTITIES_AFTER_STEP = ("parameters after the step", "optimizer state", "reported loss")
QUANTITIES_IN_ORDER = (
    "samples",
    PASSED_IN_FORWARD,
    "losses",
    PASSED_IN_BACKWARD,
    "gradients",
    "gradient norm",
    *QUANTITIES_AFTER_STEP,
)
"""Kinds of numbers, in the order in which a step computes them."""
EARLY_PHASES = ("forward", "pipeline")


class _Difference(NamedTuple):
    """A number that differs between two runs on one rank; the fields are those of FirstDifference."""

    step: int
    quantity: str
    name: str
    place: int = 0  # of a collective, among those of its step


def find_first_difference(first_run: Run, second_run: Run) -> FirstDifference | None:
    """Return the first difference between two runs.

    None if all numbers of the steps and ranks that both have are equal. First is the earliest step, and in it the
    earliest quantity of QUANTITIES_IN_ORDER. Its names and ranks are all that differ there. If a number changed on one
    rank, what this rank passes differs before other ranks' numbers do.
    """
    differences: list[tuple[int, _Difference]] = []
    for rank in sorted(first_run.ranks.keys() & second_run.ranks.keys()):
        differences += [
            (rank, difference) for difference in _differences_on_rank(first_run.ranks[rank], second_run.ranks[rank])
        ]
    if not differences:
        return None

    def time_of(difference: _Difference) -> tuple[int, int, int]:
        return (difference.step, QUANTITIES_IN_ORDER.index(difference.quantity), difference.place)

    first = min(time_of(difference) for _, difference in differences)
    earliest = [(rank, difference) for rank, difference in differences if time_of(difference) == first]
    names = dict.fromkeys(difference.name for _, difference in earliest)
    ranks = dict.fromkeys(rank for rank, _ in earliest)
    step, quantity_index, _ = first
    return FirstDifference(step, QUANTITIES_IN_ORDER[quantity_index], tuple(names), tuple(ranks))


def _differences_on_rank(first_evidence: RankEvidence, second_evidence: RankEvidence) -> Iterator[_Difference]:
    """Yield each number that differs between two runs of a rank, in the steps that both have.

    Of collectives the first one of a step is yielded that passed other bytes. They are left out if bytes were not
    recorded, or if both runs did not issue the same calls.
    """
    steps = {step.step: step for step in second_evidence.steps}
    for step in first_evidence.steps:
        if step.step in steps:
            yield from (_Difference(step.step, *named) for named in step_differences(step, steps[step.step]))
    if (
        first_evidence.passed is None
        or second_evidence.passed is None
        or first_evidence.collectives != second_evidence.collectives
    ):
        return
    places: Counter[int] = Counter()
    differing_steps = {0}  # collectives that set the job up belong to no step: leave them out
    for call, first_digest, second_digest in zip(
        first_evidence.collectives, first_evidence.passed, second_evidence.passed, strict=True
    ):
        places[call.step] += 1
        if first_digest != second_digest and call.step not in differing_steps:
            differing_steps.add(call.step)
            quantity = PASSED_IN_FORWARD if call.phase in EARLY_PHASES else PASSED_IN_BACKWARD
            yield _Difference(call.step, quantity, f"{call.op} of {call.dtype} in {call.phase}", places[call.step])


def step_differences(first_step: StepEvidence, second_step: StepEvidence) -> Iterator[tuple[str, str]]:
    """Yield (quantity, name) of each difference between two runs' evidence of one step on one rank.

    quantity is one of QUANTITIES_IN_ORDER. Arrays are compared by their bytes. Tensors that only the second run has are
    not compared, nor are microbatches that one run lacks, except for their number.
    """
    if len(first_step.microbatches) != len(second_step.microbatches):
        yield "samples", "microbatches, whose number differs"
    for number, (first, second) in enumerate(zip(first_step.microbatches, second_step.microbatches, strict=False)):
        if not (_has_equal_bytes(first.tokens, second.tokens) and _has_equal_bytes(first.labels, second.labels)):
            yield "samples", f"microbatch {number}"
        if not _is_same_number(first.loss_sum, second.loss_sum):
            yield "losses", f"microbatch {number}"
    yield from (("gradients", fqn) for fqn in _unequal_names(first_step.gradients, second_step.gradients))
    if not _is_same_number(first_step.grad_norm, second_step.grad_norm):
        yield "gradient norm", "as reported"
    yield from (
        ("parameters after the step", fqn) for fqn in _unequal_names(first_step.parameters, second_step.parameters)
    )
    for fqn in first_step.optimizer_state.keys() & second_step.optimizer_state.keys():
        for key in _unequal_names(first_step.optimizer_state[fqn], second_step.optimizer_state[fqn]):
            yield "optimizer state", f"{fqn}, {key}"
    if not _is_same_number(first_step.reported_loss, second_step.reported_loss):
        yield "reported loss", "of the step"


def _is_same_number(first: float | None, second: float | None) -> bool:
    """Return whether two numbers are equal: two NaN are, and two None."""
    if first is None or second is None:
        return first is second
    return first == second or (math.isnan(first) and math.isnan(second))


def _unequal_names(first: Mapping[str, np.ndarray], second: Mapping[str, np.ndarray]) -> Iterator[str]:
    """Return the names of arrays whose bytes or shapes differ, or that only the first has.

    Names that only the second has are left out.
    """
    return (name for name, value in first.items() if not _has_equal_bytes(value, second.get(name)))


def _has_equal_bytes(first: np.ndarray | None, second: np.ndarray | None) -> bool:
    """Return whether shape and bytes of two arrays are equal, so that two NaN are, and two None."""
    if first is None or second is None:
        return first is second
    return first.shape == second.shape and first.tobytes() == second.tobytes()
