"""The spread of repeats by hand: what is largest, and what is no number."""

from __future__ import annotations

import math
import weakref

import numpy as np
import pytest

from harness.faults.margins import NUMBERS, Margin, margin_table
from harness.reference.noise import measure_noise
from harness.reference.record import ReferenceStep


def step(number: int, loss: float = 1.0, norm: float = 1.0, gradient: float = 1.0) -> ReferenceStep:
    gradients = {"w": np.array([1.0, gradient]), "v": np.array([2.0])}
    return ReferenceStep(number, loss, norm, 0.1, 1, gradients, {}, {})


REFERENCE = (step(1), step(2))


def test_a_spread_is_the_largest_distance_up_to_that_step() -> None:
    repeats = [(step(1, loss=1.5), step(2, norm=0.75)), (step(1, gradient=3.0), step(2, loss=1.25))]
    noise = measure_noise(REFERENCE, repeats)
    assert (noise.repeats, noise.loss, noise.grad_norm, noise.gradient) == (2, (0.5, 0.5), (0.0, 0.25), (2.0, 2.0))
    off = 2 / math.sqrt(2)  # [1, 3] for [1, 1]: its best fit is 2, and what is off has length 2
    assert noise.distance == {"w": (pytest.approx(off),) * 2, "v": (0.0, 0.0)}
    assert noise.fit == {"w": (1.0, 1.0), "v": (0.0, 0.0)}


def test_a_repeat_is_gone_before_the_next_is_made() -> None:
    made: list[weakref.ref[ReferenceStep]] = []

    def repeat(_: int) -> tuple[ReferenceStep, ...]:
        assert all(one() is None for one in made)
        steps = (step(1), step(2))
        made.extend(map(weakref.ref, steps))
        return steps

    assert measure_noise(REFERENCE, map(repeat, range(3))).repeats == 3


@pytest.mark.parametrize("what", ["loss", "norm", "gradient"])
def test_a_repeat_that_is_no_number_is_not_lost_behind_one_that_is(what: str) -> None:
    repeats = [(step(1, **{what: 1.5}), step(2)), (step(1), step(2, **{what: math.nan}))]
    noise = measure_noise(REFERENCE, repeats)
    name = {"norm": "grad_norm"}.get(what, what)
    first, second = getattr(noise, name)
    assert first == 0.5 and math.isnan(second)
    assert not noise.finite and measure_noise(REFERENCE, [REFERENCE]).finite


def test_a_run_that_is_no_number_in_a_later_step_is_not_within_its_bound() -> None:
    quiet = {number: [0.1, 0.1] for number in NUMBERS}
    bound = {number: [1.0, 1.0] for number in quiet}
    one = Margin("name", "recipe", bound, {"case": quiet | {"loss": [0.1, math.nan]}}, {"mistake": quiet})
    assert [line.split()[-1] for line in margin_table(one).splitlines()[2:]] == ["loss", "SEEN"]
    assert "seen by loss" in margin_table(one)
