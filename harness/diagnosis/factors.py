"""A factor, and which number of the case it is: a degree, the accumulation, the number of valid tokens, or products."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping

from harness.evidence.text import number_text
from harness.judge.losses import losses
from harness.judge.trial import Trial
from harness.plan.grid import coordinate
from harness.spec.dims import AXES

MOST_NAMES = 3
ByStep = Callable[[int], float]


def times_text(factor: float) -> str:
    """0.25 times."""
    return f"{number_text(factor)} times"


def factor_text(trial: Trial, factor: float, everywhere: bool = True) -> str:
    """All numbers of the case that the factor may be, the same in every step; empty if it is none. Equal numbers are no proof.
    everywhere: of every parameter."""
    if math.isclose(factor, -1.0):
        return ": the sign is wrong"
    texts = []
    for value, text in ((factor, NOT_DIVIDED), (1 / factor if factor else math.nan, DIVIDED)):
        names = _axes(trial, value)
        if everywhere and _near(value, trial.case.training.global_batch):
            names.append("the number of samples")
        if names:
            texts.append(text.format(" or ".join(names[:MOST_NAMES]), round(value)))
    same = (name for name, by_step in _of_tokens(trial, trial.first_step, factor) if _constant(trial, by_step))
    texts += same if everywhere and factor != 1 else ()
    return f": as if {', or '.join(texts)}" if texts else ""


def token_factors(trial: Trial, step: int, factor: float) -> Iterator[tuple[str, ByStep]]:
    """Numbers of tokens that the factor may be in this step, and that differ from step to step. step: the first that is wrong.

    One step is no proof: what would be wrong before, and what shows in no other step, is a coincidence.
    """
    for name, by_step in _of_tokens(trial, step, factor):
        before, after = ([n for n in trial.case.steps if n < step], [n for n in trial.case.steps if n > step])
        shown = any(not _near(by_step(number), 1) for number in after)
        if not _constant(trial, by_step) and shown and all(_near(by_step(number), 1) for number in before):
            yield f": {name}", by_step


NOT_DIVIDED, DIVIDED = "not divided by {} ({})", "divided an extra time by {} ({})"


def _of_tokens(trial: Trial, step: int, factor: float) -> Iterator[tuple[str, ByStep]]:
    """What a number of tokens that is divided by wrongly makes of gradients, where that is the factor in a step."""
    valid = {one.step: one.valid_tokens for one in trial.reference.steps}
    size = {number: trial.case.training.global_batch * trial.case.seq_len(number) for number in valid}
    found: list[tuple[str, ByStep]] = []
    for name, counts in (("the number of valid tokens", valid), ("the number of all tokens", size)):
        found.append((NOT_DIVIDED.format(name, counts[step]), _ratio(counts, {})))
        found.append((DIVIDED.format(name, counts[step]), _ratio({}, counts)))
    found.append(("divided by the number of all tokens, not of the valid ones", _ratio(valid, size)))
    for other, count in valid.items():
        text = f"divided by the number of valid tokens of step {other} ({count}, not {valid[step]})"
        found.append((text, _ratio(valid, dict.fromkeys(valid, count))))
    if step - 1 in valid:
        text = f"divided by the number of valid tokens of the step before ({valid[step - 1]}, not {valid[step]})"
        found.append((text, _ratio(valid, {number: valid.get(number - 1, valid[number]) for number in valid})))
    for number, counts in _tokens_of_microbatches(trial).items():
        text = f"divided by the valid tokens of microbatch {number} alone ({counts[step]}, not {valid[step]})"
        found.append((text, _ratio(valid, counts)))
        passes = trial.case.passes
        text = f"divided by {passes} times the valid tokens of microbatch {number} ({passes * counts[step]}, not {valid[step]})"
        found.append((text, _ratio(valid, {at: passes * count for at, count in counts.items()})))
    yield from ((text, by_step) for text, by_step in found if _near(by_step(step), factor))


def _tokens_of_microbatches(trial: Trial) -> dict[int, dict[int, int]]:
    """By number, from 1, and step: the valid tokens of that microbatch of all ranks; empty where there is one alone."""
    ranks = [rank for rank in trial.ranks if coordinate(trial.case.dims, rank)["tp"] == 0]
    steps = {step: [seen for rank in ranks if (seen := losses(trial, rank, step))] for step in trial.case.steps}
    passes = trial.case.passes
    if passes == 1 or not all(of and all(len(seen) == passes for seen in of) for of in steps.values()):
        return {}
    return {n + 1: {step: sum(seen[n][1] for seen in of) for step, of in steps.items()} for n in range(passes)}


def _ratio(above: Mapping[int, int], below: Mapping[int, int]) -> ByStep:
    return lambda step: above.get(step, 1) / below.get(step, 1)


def _constant(trial: Trial, by_step: ByStep) -> bool:
    numbers = [by_step(step.step) for step in trial.reference.steps]
    return all(_near(number, numbers[0]) for number in numbers)


def _axes(trial: Trial, value: float) -> list[str]:
    """Degrees, or else products of as few as possible, that are `value`."""
    dims = trial.case.dims
    known = {axis: getattr(dims, axis) for axis in AXES} | {"accumulation": trial.case.features.accumulation}
    known["the number of a pipeline's microbatches"] = trial.case.microbatches
    known = {name: number for name, number in known.items() if number > 1}
    for count in range(1, len(known) + 1):
        chosen = itertools.combinations(known, count)
        names = [" x ".join(some) for some in chosen if _near(value, math.prod(known[name] for name in some))]
        if names:
            return names
    return []


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-6)
