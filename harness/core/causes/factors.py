"""Factors of gradients, and the numbers of the case that a factor may be: degrees, accumulation, numbers of tokens.

Products of these are tried, too. The distance between two steps is another such number.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from harness.core.case.dims import AXES
from harness.core.evidence.text import number_text
from harness.core.judge.losses import losses_of_rank
from harness.core.judge.trial import Trial
from harness.core.plan.grid import coordinate_of_rank

MOST_NAMES = 3
FactorByStep = Callable[[int], float]
"""Step -> the factor in it."""


def times_text(factor: float) -> str:
    """Return a factor as a text: "0.25 times"."""
    return f"{number_text(factor)} times"


def factor_text(trial: Trial, factor: float, everywhere: bool = True) -> str:
    """Return a text of all constant numbers of the case that the factor may be: ": as if not divided by tp (2)".

    Empty if none fits. Equal numbers are no proof, so several may be named. everywhere: whether it is the factor of
    every parameter; only then numbers of samples and tokens are tried.
    """
    if math.isclose(factor, -1.0):
        return ": the sign is wrong"
    templates = (
        (factor, "not divided by {} ({})"),
        (1 / (factor or math.nan), "divided an extra time by {} ({})"),
    )
    texts = []
    for value, template in templates:
        names = _names_of_number(trial, value, everywhere)
        if names:
            texts.append(template.format(" or ".join(names[:MOST_NAMES]), round(value)))
    if everywhere and factor != 1:
        for text, by_step in _token_factors_in_step(trial, trial.first_step, factor):
            if _is_constant(trial, by_step):
                texts.append(text)
    return f": as if {', or '.join(texts)}" if texts else ""


def _names_of_number(trial: Trial, value: float, everywhere: bool) -> list[str]:
    """Return the names of degrees that are `value`, or else products of as few as possible: "tp x accumulation".

    Empty if none fits. everywhere: whether to try the number of samples, too.
    """
    numbers = {axis: getattr(trial.case.dims, axis) for axis in AXES}
    numbers["accumulation"] = trial.case.features.accumulation
    numbers["the number of a pipeline's microbatches"] = trial.case.microbatches
    sizes = {name: number for name, number in numbers.items() if number > 1}
    samples = []
    if everywhere and _is_near(value, trial.case.training.global_batch):
        samples.append("the number of samples")
    for count in range(1, len(sizes) + 1):
        products = []
        for names in itertools.combinations(sizes, count):
            if _is_near(value, math.prod(sizes[name] for name in names)):
                products.append(" x ".join(names))
        if products:
            return products + samples
    return samples


def token_factors(trial: Trial, step: int, factor: float) -> Iterator[tuple[str, FactorByStep]]:
    """Yield (text, factor by step) of each number of tokens that gives `factor` in `step` and is another in others.

    step: the first that is wrong. A number that would be wrong earlier, or shows in no later step, is a coincidence and
    left out.
    """
    for text, by_step in _token_factors_in_step(trial, step, factor):
        before = [number for number in trial.case.steps if number < step]
        after = [number for number in trial.case.steps if number > step]
        shown = any(not _is_near(by_step(number), 1) for number in after)
        if not _is_constant(trial, by_step) and shown and all(_is_near(by_step(number), 1) for number in before):
            yield f": {text}", by_step


def _token_factors_in_step(trial: Trial, step: int, factor: float) -> Iterator[tuple[str, FactorByStep]]:
    """Yield (text, factor by step) of each number that gradients may be divided by in place of the valid tokens.

    Only numbers that give `factor` in `step` are yielded.
    """
    valid = {reference_step.step: reference_step.valid_tokens for reference_step in trial.reference.steps}
    valid_text = "the number of valid tokens"
    sizes = {number: trial.case.training.global_batch * trial.case.seq_len(number) for number in valid}
    divisors: dict[str, Mapping[int, float]] = {
        f"not divided by {valid_text}": dict.fromkeys(valid, 1),
        f"divided an extra time by {valid_text}": {number: count**2 for number, count in valid.items()},
        "divided by the number of all tokens, not of the valid ones": sizes,
        f"divided by {valid_text} of the step before": {
            number: valid.get(number - 1, valid[number]) for number in valid
        },
    }
    for number, count in valid.items():
        divisors[f"divided by {valid_text} of step {number}"] = dict.fromkeys(valid, count)
    for number, counts in _tokens_of_microbatches(trial).items():
        divisors[f"divided by the valid tokens of microbatch {number} alone"] = counts
        times_passes = {counted_step: trial.case.passes * count for counted_step, count in counts.items()}
        divisors[f"divided by {trial.case.passes} times the valid tokens of microbatch {number}"] = times_passes
    for text, divisor in divisors.items():
        if _is_near(valid[step] / (divisor.get(step) or math.nan), factor):
            yield text, lambda step, divisor=divisor: valid[step] / (divisor.get(step) or 1)  # type: ignore[misc]


def _tokens_of_microbatches(trial: Trial) -> dict[int, dict[int, int]]:
    """Return the valid tokens of all ranks together, by number of the microbatch from 1 and by step.

    Empty if there is only one microbatch, or if the losses of some were not observed.
    """
    passes = trial.case.passes
    ranks = [rank for rank in trial.ranks if coordinate_of_rank(trial.case.dims, rank)["tp"] == 0]
    losses_of_ranks: dict[int, list[list[tuple[float, int]]]] = {}
    for step in trial.case.steps:
        losses_of_ranks[step] = [of_rank for rank in ranks if (of_rank := losses_of_rank(trial, rank, step))]
    if passes == 1:
        return {}
    for of_ranks in losses_of_ranks.values():
        if not of_ranks or any(len(of_rank) != passes for of_rank in of_ranks):
            return {}
    counts: dict[int, dict[int, int]] = {}
    for index in range(passes):
        counts[index + 1] = {}
        for step, of_ranks in losses_of_ranks.items():
            counts[index + 1][step] = sum(of_rank[index][1] for of_rank in of_ranks)
    return counts


def _is_constant(trial: Trial, by_step: FactorByStep) -> bool:
    """Return whether the factor is the same in every step of the reference, but for rounding."""
    numbers = [by_step(step.step) for step in trial.reference.steps]
    return all(_is_near(number, numbers[0]) for number in numbers)


def _is_near(first: float, second: float) -> bool:
    """Return whether two numbers are equal, but for rounding."""
    return math.isclose(first, second, rel_tol=1e-6)


def step_distance_text(trial: Trial, step: int, source_step: int) -> str:
    """Return a text of why a step may have received the samples of `source_step`: "as if the data began anew".

    Known are all of a checkpoint, the order of an epoch, a new start, and a step passed over. Empty for any other
    distance.
    """
    training = trial.case.training
    saved = trial.case.steps.start - 1
    epoch = -(-training.made_samples // training.global_batch) if training.data is None else 0
    if trial.case.model_of is not None and source_step - step == trial.case.model_of:
        return "as if more than the weights were taken from the checkpoint"
    if epoch and step > epoch and step - source_step == epoch:
        return "as if the epoch had the order of the one before"
    if trial.saved and saved and step - source_step == saved:
        return "as if the data began anew"
    return "as if those of one step were passed over" if source_step == step + 1 else ""
