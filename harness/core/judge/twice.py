"""Where two runs of the same launch first differ. On one machine, the same code gives the same numbers."""

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
    """Kind of number: one of ORDER."""
    names: tuple[str, ...]
    """Names of the tensors, in the order of the model; of a collective what it is, and in which phase."""
    ranks: tuple[int, ...]
    """Ranks on which they differ."""


PASSED_EARLY, PASSED = "what is passed in forward", "what is passed in backward"
AFTER = ("parameters after the step", "optimizer state", "reported loss")
ORDER = ("samples", PASSED_EARLY, "losses", PASSED, "gradients", "gradient norm", *AFTER)
"""A step comes to them in this order."""
EARLY = ("forward", "pipeline")


class _Found(NamedTuple):
    """What differs on one rank."""

    step: int
    quantity: str
    name: str
    place: int = 0  # of a collective, among those of its step


def first_difference(one: Run, other: Run) -> FirstDifference | None:
    """Return None where all numbers of the steps that both have are equal. One rank alone passes something else first, where
    a number changed on it: what it has passed changes the numbers of others."""
    ranks = sorted(one.ranks.keys() & other.ranks.keys())
    all_found = [(rank, found) for rank in ranks for found in _of_rank(one.ranks[rank], other.ranks[rank])]
    if not all_found:
        return None
    first = min((found.step, ORDER.index(found.quantity), found.place) for _, found in all_found)
    told = [(rank, each) for rank, each in all_found if (each.step, ORDER.index(each.quantity), each.place) == first]
    names, where = dict.fromkeys(each.name for _, each in told), dict.fromkeys(rank for rank, _ in told)
    return FirstDifference(first[0], ORDER[first[1]], tuple(names), tuple(where))


def _of_rank(one: RankEvidence, other: RankEvidence) -> Iterator[_Found]:
    """Yield whatever differs; of collectives the first one of a step."""
    steps = {step.step: step for step in other.steps}
    for step in one.steps:
        if step.step in steps:
            yield from (_Found(step.step, *named) for named in differing(step, steps[step.step]))
    if one.passed is None or other.passed is None or one.collectives != other.collectives:
        return
    places: Counter[int] = Counter()
    told = {0}  # what sets the job up is of no step
    for call, mine, theirs in zip(one.collectives, one.passed, other.passed, strict=True):
        places[call.step] += 1
        if mine != theirs and call.step not in told:
            told.add(call.step)
            quantity = PASSED_EARLY if call.phase in EARLY else PASSED
            yield _Found(call.step, quantity, f"{call.op} of {call.dtype} in {call.phase}", places[call.step])


def differing(one: StepEvidence, other: StepEvidence) -> Iterator[tuple[str, str]]:
    """Yield the kind of number and the name of what differs between two evidences of one step on one rank."""
    if len(one.microbatches) != len(other.microbatches):
        yield "samples", "microbatches, whose number differs"
    for number, (mine, theirs) in enumerate(zip(one.microbatches, other.microbatches, strict=False)):
        if not (_equal(mine.tokens, theirs.tokens) and _equal(mine.labels, theirs.labels)):
            yield "samples", f"microbatch {number}"
        if not _same(mine.loss_sum, theirs.loss_sum):
            yield "losses", f"microbatch {number}"
    yield from (("gradients", fqn) for fqn in _unequal(one.gradients, other.gradients))
    if not _same(one.grad_norm, other.grad_norm):
        yield "gradient norm", "as reported"
    yield from (("parameters after the step", fqn) for fqn in _unequal(one.parameters, other.parameters))
    for fqn in one.optimizer_state.keys() & other.optimizer_state.keys():
        states = one.optimizer_state[fqn], other.optimizer_state[fqn]
        yield from (("optimizer state", f"{fqn}, {key}") for key in _unequal(*states))

    if not _same(one.reported_loss, other.reported_loss):
        yield "reported loss", "of the step"


def _same(one: float | None, other: float | None) -> bool:
    return one == other or (one is not None and other is not None and math.isnan(one) and math.isnan(other))


def _unequal(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> Iterator[str]:
    return (name for name, value in one.items() if not _equal(value, other.get(name)))


def _equal(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    """Bytes: two NaN are the same number here."""
    if one is None or other is None:
        return one is other
    return one.shape == other.shape and one.tobytes() == other.tobytes()
