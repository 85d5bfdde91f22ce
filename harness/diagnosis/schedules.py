"""Which rule gives the learning rates that were seen, where the schedule requested does not."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from harness.judge.trial import Trial
from harness.reference.config import TrainingConfig

Rate = Callable[[int], float]
"""By step, counted from 1."""


def schedule_of(trial: Trial, seen: Mapping[tuple[int, int], float]) -> str:
    """In words, after a colon; empty where none gives all of them. seen: by rank and step, those that are wrong."""
    for text, rate in _rules(trial.case.training):
        if len({step for _, step in seen}) > 1 and all(_near(rate(step), lr) for (_, step), lr in seen.items()):
            return f": {text}"
    return ""


def _rules(training: TrainingConfig) -> Iterator[tuple[str, Rate]]:
    from harness.reference.train import learning_rate

    if training.rates is not None:
        return
    peak, warmup, steps, last = training.lr, training.warmup_steps, training.steps, training.final_lr_fraction

    def rising(step: int, falls: Callable[[float], float]) -> float:
        """falls(how far behind the warm-up, 0 to 1) -> of the peak."""
        done = (step - warmup) / max(1, steps - warmup)
        return peak * (step / warmup if step <= warmup else falls(min(1.0, done)))

    def cosine(done: float) -> float:
        return last + (1 - last) * (1 + math.cos(math.pi * done)) / 2

    for by, text in ((-1, "that of the step before, in every step"), (1, "that of the next step, in every step")):
        yield text, lambda step, by=by: learning_rate(step + by, training)  # type: ignore[misc]
    yield "as without a schedule", lambda step: peak
    yield "constant behind the warm-up", lambda step: rising(step, lambda done: 1.0)
    yield (
        "a line falls behind the warm-up, in place of a cosine",
        lambda step: rising(step, lambda done: 1 - (1 - last) * done),
    )
    yield (
        "the cosine counts the steps of the warm-up as well",
        lambda step: peak * (step / warmup if step <= warmup else cosine(min(1.0, step / steps))),
    )
    yield (
        "the cosine takes as many steps as there are, behind the warm-up",
        lambda step: peak * (step / warmup if step <= warmup else cosine(min(1.0, (step - warmup) / steps))),
    )
    yield (
        "the cosine also multiplies the warm-up",
        lambda step: peak * min(1.0, step / warmup if warmup else 1.0) * cosine(min(1.0, step / steps)),
    )
    for name, values in _numbers(training).items():
        for value in values:
            changes: dict[str, Any] = {name: value}
            rate = partial(learning_rate, training=replace(training, **changes))
            yield f"as with {name} {value:g}, not {getattr(training, name):g}", rate


def _numbers(training: TrainingConfig) -> dict[str, list[float]]:
    lr, warmup, steps = training.lr, training.warmup_steps, training.steps
    found: dict[str, list[float]] = {
        "warmup_steps": [0, warmup - 1, warmup + 1, 2 * warmup, warmup // 2],
        "final_lr_fraction": [0.0, 0.01, 0.1, 0.5, 1.0],
        "steps": [steps - 1, steps + 1, 2 * steps, steps // 2],
        "lr": [lr * by for by in (0.1, 0.5, 2.0, 10.0)],
    }
    return {
        name: [value for value in dict.fromkeys(values) if value >= 0 and value != getattr(training, name)]
        for name, values in found.items()
    }


def _near(one: float, other: float) -> bool:
    return math.isclose(one, other, rel_tol=1e-9)
