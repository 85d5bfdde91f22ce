"""Bounds: numbers worked out by hand, and small enough on the real reference that the smallest real mistake is seen."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from literal import ADAMW, SGD, TINY, tiny_case
from literal_reference import reference_of

from harness.core.case.case import Case
from harness.core.case.loading import find_case, load_all
from harness.core.judge import golden
from harness.core.judge.tolerance import (
    NoBound,
    bounds_of_recipe,
    clip_coefficient,
    measured_bounds,
    relative_difference,
    relative_rounding,
    update_bound,
)
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.model import RMSNorm
from harness.reference.train import train

SMALLEST_MISTAKE = 1e-8
U = 2.0**-53


# ---- relative_difference

ONE = np.array([1.0, -4.0])


@pytest.mark.parametrize(
    ("observed", "expected", "difference"),
    [
        (ONE, ONE, 0.0),
        (ONE + [1.0, 0.0], ONE, 0.25),  # relative to the largest entry, whatever entry differs
        (np.zeros(2), ONE, 1.0),
        (np.zeros((0, 3)), np.zeros((0, 3)), 0.0),
        (np.zeros(2), np.zeros(2), 0.0),
        (np.array([0.0, 1e-300]), np.zeros(2), math.inf),
        (np.array([np.nan, -4.0]), ONE, math.inf),
        (np.array([np.inf, -4.0]), ONE, math.inf),
        (ONE, np.array([np.nan, -4.0]), math.inf),
        (np.array([np.inf, 1.0]), np.array([np.inf, 1.0]), math.inf),
        (ONE[:1], ONE, math.inf),
        (ONE.reshape(1, 2), ONE, math.inf),
        (np.array(2.0), np.array(1.0), 1.0),
    ],
)
def test_relative_difference(observed: np.ndarray, expected: np.ndarray, difference: float) -> None:
    with np.errstate(invalid="ignore"):
        assert relative_difference(observed, expected) == difference


def test_relative_difference_to_a_scale_of_ones_own() -> None:
    assert relative_difference(ONE + 1, ONE, scale=100.0) == 0.01
    assert relative_difference(ONE, ONE, scale=0.0) == 0.0
    assert relative_difference(ONE + 1, ONE, scale=0.0) == math.inf


# ---- clipping


@pytest.mark.parametrize(
    ("norm", "most", "expected"),
    [(4.0, None, 1.0), (0.5, 1.0, 1.0), (1.0, 1.0, 1 / 1.000001), (4.0, 1.0, 1 / 4.000001), (0.0, 1.0, 1.0)],
)
def test_the_clip_coefficient(norm: float, most: float | None, expected: float) -> None:
    assert clip_coefficient(norm, most) == expected


# ---- bounds


def test_gamma_of_the_tiny_model() -> None:
    # longest sum: 8 samples x 4 positions = 32; matmuls: 7 in the layer and 1 for the output, both ways three times
    case = tiny_case("single")
    assert relative_rounding(case, 7) == 8 * math.sqrt(8 * 32) * U == 128 * U
    assert relative_rounding(case, 21) == 8 * math.sqrt(24 * 32) * U
    assert relative_rounding(replace(case, training=replace(ADAMW, dtype="float32")), 7) == 128 * 2.0**-24


def test_the_bounds_of_step_1_are_rounding_alone() -> None:
    case = tiny_case("single")
    found = bounds_of_recipe(case, reference_of(case))
    assert (found.loss[1], found.gradient[1]) == (128 * U, 8 * math.sqrt(24 * 32) * U)


def test_the_bounds_of_step_2_under_sgd_add_what_the_first_step_moved() -> None:
    """One parameter of two entries: every entry may be off by lr * gamma * the largest gradient."""
    case = tiny_case("single", replace(SGD, max_norm=None))
    whole = reference_of(case)
    first, second = (
        replace(
            step,
            loss=2.0,
            lr=0.5,
            gradients={"w": np.array(gradient)},
            parameters={"w": np.array(parameters)},
        )
        for step, gradient, parameters in zip(
            whole.steps[:2], ([1.0, -2.0], [1.0, -1.0]), ([0.0, 0.0], [3.0, 4.0]), strict=True
        )
    )
    found = bounds_of_recipe(case, replace(whole, steps=(first, second)))
    both = 8 * math.sqrt(24 * 32) * U
    moved = 0.5 * both * 2.0
    assert found.loss == pytest.approx({1: 128 * U, 2: 128 * U + (1 + 1) * moved / 2.0}, rel=1e-12)
    # the gradient changed by half of its largest entry over a distance of 5, and both entries may have moved
    assert found.gradient == pytest.approx({1: both, 2: both + 0.5 / 5 * math.sqrt(2) * moved}, rel=1e-12)


@pytest.mark.parametrize("training", [ADAMW, SGD], ids=["adamw", "sgd"])
def test_bounds_never_shrink_from_step_to_step(training: TrainingConfig) -> None:
    case = tiny_case("single", training)
    found = bounds_of_recipe(case, reference_of(case))
    for by_step in (found.loss, found.gradient):
        assert list(by_step) == [1, 2, 3]
        assert list(by_step.values()) == sorted(by_step.values())


def test_bounds_grow_with_the_model_and_the_batch() -> None:
    case = tiny_case("single")
    deeper = replace(case, model=replace(TINY, n_layers=4))
    longer = replace(case, training=replace(ADAMW, global_batch=64))
    assert relative_rounding(case, 7) < relative_rounding(deeper, 7)
    assert relative_rounding(case, 7) < relative_rounding(longer, 7)


def test_no_bound_is_better_than_an_infinite_one() -> None:
    """An infinite number in the reference's path has no relative change: a bound of infinity would let everything pass."""
    case = tiny_case("single")
    reference = reference_of(case)
    first = reference.steps[0]
    spoiled = first.gradients | {"norm.weight": np.full(4, np.inf)}
    reference = replace(reference, steps=(replace(first, gradients=spoiled), *reference.steps[1:]))
    with pytest.raises(NoBound):
        bounds_of_recipe(case, reference)


def test_an_entry_that_never_had_a_gradient_adds_no_noise() -> None:
    """A token that never occurs: AdamW would divide by zero, and its row must not loosen the bound of the others."""
    case = tiny_case("single")
    reference = reference_of(case)
    fqn = "tok_embeddings.weight"

    def unused(step):
        row_7 = np.arange(8)[:, None] == 7
        state = {key: np.where(row_7, 0.0, value) for key, value in step.optimizer_state[fqn].items()}
        gradient = np.where(row_7, 0.0, step.gradients[fqn])
        return replace(
            step,
            gradients=step.gradients | {fqn: gradient},
            optimizer_state=step.optimizer_state | {fqn: state},
        )

    spoiled = bounds_of_recipe(case, replace(reference, steps=tuple(map(unused, reference.steps))))
    assert spoiled.loss[3] < SMALLEST_MISTAKE and spoiled.gradient[3] < SMALLEST_MISTAKE


def test_the_bound_of_an_update_is_a_few_roundings_of_what_was_added() -> None:
    case = tiny_case("single")
    elements = 236  # of the tiny model
    expected = (64 + 8 * math.sqrt(elements)) * U * np.array([0.0, 2.0])
    assert update_bound(case, np.array([0.0, 2.0])).tolist() == expected.tolist()


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_the_bounds_of_the_debug_model_see_the_smallest_real_mistake(optimizer: str) -> None:
    """On the real reference: 2.9e-12 and 4.4e-9 in step 3 with adamw, 1.0e-13 and 5.3e-12 with sgd."""
    train = pytest.importorskip("harness.reference.train").train
    training = TrainingConfig(optimizer=optimizer, lr=3e-3 if optimizer == "adamw" else 0.05)
    case = Case("debug", "-", training=training)
    found = bounds_of_recipe(case, train(ModelConfig(), training))
    assert max(found.loss.values()) < SMALLEST_MISTAKE / 1000
    assert max(found.gradient.values()) < SMALLEST_MISTAKE


def test_a_norm_that_rounds_once_lies_beyond_the_noise_of_shares_and_within_that_of_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """torch's own fused norm, which torchtitan uses: it rounds after the weight, the reference before it as well."""
    case = find_case("bf16_fsdp_2", load_all())
    accepted = golden.load_golden(case)
    assert accepted is not None
    recipe = replace(case.training, steps=1)
    (expected,) = train(case.model, recipe, "cpu", noise=()).steps

    def fused(norm: RMSNorm, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)

    monkeypatch.setattr(RMSNorm, "forward", fused)
    (seen,) = train(case.model, recipe, "cpu", noise=()).steps
    difference = abs(seen.loss / expected.loss - 1)
    shares, parts = (measured_bounds(case, accepted.noise[f"float32 {kind}"]).loss[1] for kind in ("shares", "parts"))
    assert shares < difference < parts
