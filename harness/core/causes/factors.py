"""A factor, and which number of the case it is: a degree, the accumulation, the number of valid tokens, or products.

The distance between two steps is another such number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from harness.core.case.dims import AXES
from harness.core.evidence.text import number_text
from harness.core.judge.losses import losses
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate

MOST_NAMES = 3
ByStep = Callable[[int], float]


def times_text(factor: float) -> str:
    """0.25 times."""
    return f"{number_text(factor)} times"


def factor_text(trial: Trial, factor: float, everywhere: bool = True) -> str:
    """Return all numbers of the case that the factor may be, the same in every step. Equal numbers are no proof.

    everywhere: whether it is the factor of every parameter.
    """
    if math.isclose(factor, -1.0):
        return ": the sign is wrong"
    ways = (factor, "not divided by {} ({})"), (1 / (factor or math.nan), "divided an extra time by {} ({})")
    named = [(how, value, _degrees(trial, value, everywhere)) for value, how in ways]
    texts = [how.format(" or ".join(names[:MOST_NAMES]), round(value)) for how, value, names in named if names]
    if everywhere and factor != 1:
        texts += [text for text, by in _of_tokens(trial, trial.first_step, factor) if _constant(trial, by)]
    return f": as if {', or '.join(texts)}" if texts else ""


def _degrees(trial: Trial, value: float, everywhere: bool) -> list[str]:
    """Return degrees, or else products of as few as possible, that are `value`."""
    known = {axis: getattr(trial.case.dims, axis) for axis in AXES} | {"accumulation": trial.case.features.accumulation}
    known["the number of a pipeline's microbatches"] = trial.case.microbatches
    sizes = {name: number for name, number in known.items() if number > 1}
    samples = ["the number of samples"] * (everywhere and _near(value, trial.case.training.global_batch))
    for count in range(1, len(sizes) + 1):
        chosen = itertools.combinations(sizes, count)
        if names := [" x ".join(some) for some in chosen if _near(value, math.prod(sizes[name] for name in some))]:
            return names + samples
    return samples


def token_factors(trial: Trial, step: int, factor: float) -> Iterator[tuple[str, ByStep]]:
    """Yield numbers of tokens that the factor may be in this step, the first that is wrong, and that differ from step to step.

    One step is no proof: what would be wrong before, and what shows in no other step, is a coincidence.
    """
    for text, by_step in _of_tokens(trial, step, factor):
        before, after = ([n for n in trial.case.steps if n < step], [n for n in trial.case.steps if n > step])
        shown = any(not _near(by_step(number), 1) for number in after)
        if not _constant(trial, by_step) and shown and all(_near(by_step(number), 1) for number in before):
            yield f": {text}", by_step


def _of_tokens(trial: Trial, step: int, factor: float) -> Iterator[tuple[str, ByStep]]:
    """Yield what gradients are divided by in place of the number of valid tokens, where that gives the factor in a step."""
    valid, own = {one.step: one.valid_tokens for one in trial.reference.steps}, "the number of valid tokens"
    size = {number: trial.case.training.global_batch * trial.case.seq_len(number) for number in valid}
    instead: dict[str, Mapping[int, float]] = {
        f"not divided by {own}": dict.fromkeys(valid, 1),
        f"divided an extra time by {own}": {number: count**2 for number, count in valid.items()},
        "divided by the number of all tokens, not of the valid ones": size,
        f"divided by {own} of the step before": {number: valid.get(number - 1, valid[number]) for number in valid},
    }
    instead |= {f"divided by {own} of step {other}": dict.fromkeys(valid, count) for other, count in valid.items()}
    for number, counts in _of_microbatches(trial).items():
        instead[f"divided by the valid tokens of microbatch {number} alone"] = counts
        several = {at: trial.case.passes * count for at, count in counts.items()}
        instead[f"divided by {trial.case.passes} times the valid tokens of microbatch {number}"] = several
    for text, other in instead.items():
        if _near(valid[step] / (other.get(step) or math.nan), factor):
            yield text, lambda at, other=other: valid[at] / (other.get(at) or 1)  # type: ignore[misc]


def _of_microbatches(trial: Trial) -> dict[int, dict[int, int]]:
    """Return valid tokens of all ranks, by number of microbatch, from 1, and step; empty if there is only one."""
    ranks, passes = [r for r in trial.ranks if coordinate(trial.case.dims, r)["tp"] == 0], trial.case.passes
    steps = {step: [seen for rank in ranks if (seen := losses(trial, rank, step))] for step in trial.case.steps}
    if passes == 1 or not all(of and all(len(seen) == passes for seen in of) for of in steps.values()):
        return {}
    return {n + 1: {step: sum(seen[n][1] for seen in of) for step, of in steps.items()} for n in range(passes)}


def _constant(trial: Trial, by_step: ByStep) -> bool:
    numbers = [by_step(step.step) for step in trial.reference.steps]
    return all(_near(number, numbers[0]) for number in numbers)


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)


def how_far(trial: Trial, step: int, of: int) -> str:
    """Say what distance lies between a step and the one whose samples it receives; empty if it is no known one."""
    training, saved = trial.case.training, trial.case.steps.start - 1
    epoch = -(-training.made_samples // training.global_batch) if training.data is None else 0
    if trial.case.model_of is not None and of - step == trial.case.model_of:
        return "as if more than the weights were taken from the checkpoint"
    if epoch and step > epoch and step - of == epoch:
        return "as if the epoch had the order of the one before"
    if trial.saved and saved and step - of == saved:
        return "as if the data began anew"
    return "as if those of one step were passed over" if of == step + 1 else ""
