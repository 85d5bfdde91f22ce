"""What a factor of gradients is said to be: numbers of tokens, of one step or of several. By hand, no ranks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from harness.diagnosis.factors import _of_tokens, factor_text, token_factors
from harness.spec.dims import ParallelDims

VALID, LENGTHS = {1: 10, 2: 20, 3: 40}, {1: 4, 2: 8, 3: 16}


def trial_with(valid: dict[int, int] = VALID, batch: int = 4, dims: ParallelDims | None = None) -> Any:
    """Of which only the numbers of its tokens are known; each step's length is another."""
    case = SimpleNamespace(
        training=SimpleNamespace(global_batch=batch),
        seq_len=LENGTHS.__getitem__,
        passes=1,
        steps=[*valid],
        dims=dims or ParallelDims(),
        features=SimpleNamespace(accumulation=1),
        microbatches=1,
    )
    steps = [SimpleNamespace(step=step, valid_tokens=count) for step, count in valid.items()]
    return SimpleNamespace(case=case, ranks={}, first_step=1, reference=SimpleNamespace(steps=steps))


def steps_of(step: int, factor: float) -> list[list[float]]:
    """Of each number of tokens whose quotient it may be, the factor that there would be in each step."""
    return sorted([by_step(at) for at in VALID] for _, by_step in _of_tokens(trial_with(), step, factor))


@pytest.mark.parametrize(
    ("step", "factor", "wanted"),
    [
        (3, 40, [[10, 20, 40]]),  # not divided by the number of valid tokens
        (2, 1 / 20, [[1 / 10, 1 / 20, 1 / 40]]),  # divided by it again
        (2, 20 / 32, [[10 / 16, 20 / 32, 40 / 64]]),  # by all tokens
        (3, 2, [[0.5, 1, 2], [1, 2, 2]]),  # by those of step 2, or of the step before
        (2, 2, [[1, 2, 2], [1, 2, 4]]),
        (1, 0.25, [[0.25, 0.5, 1]]),
        (1, 7, []),
    ],
)
def test_a_factor_is_told_by_the_numbers_of_tokens_whose_quotient_it_is(
    step: int, factor: float, wanted: list[list[float]]
) -> None:
    assert steps_of(step, factor) == [pytest.approx(steps) for steps in wanted]


def test_a_number_that_differs_from_step_to_step_is_told_with_what_it_is_in_each() -> None:
    assert [by_step(2) for _, by_step in token_factors(trial_with(), 1, 10)] == [20]
    assert factor_text(trial_with(), 10) == ""
    same = trial_with({1: 10, 2: 10})
    assert list(token_factors(same, 2, 10)) == []
    assert "valid tokens" in factor_text(same, 10) and factor_text(same, 10, everywhere=False) == ""


def test_one_step_is_no_proof_of_a_number_of_tokens() -> None:
    """What would be wrong in a step before the first wrong one, and what no later step shows, is a coincidence."""
    trial = trial_with({1: 10, 2: 20, 3: 40})
    assert [*token_factors(trial, 3, 2)] == [] and steps_of(3, 2)
    assert [*token_factors(trial, 2, 20)] == [] and steps_of(2, 20)
    assert [1, 2, 4] in [[by_step(step) for step in (1, 2, 3)] for _, by_step in token_factors(trial, 2, 2)]


@pytest.mark.parametrize(
    ("factor", "degrees", "named", "value"),
    [
        (2, {"dp_shard": 2, "tp": 2}, "dp_shard or tp", "(2)"),
        (0.25, {"dp_shard": 2, "tp": 2}, "dp_shard x tp", "(4)"),
        (2, {"dp_replicate": 2, "dp_shard": 2, "tp": 2, "cp": 2}, "dp_replicate or dp_shard or cp", "(2)"),
        (12, {"tp": 2}, "the number of samples", "(12)"),
        (2 * (1 + 5e-7), {"tp": 2}, "tp", "(2)"),
        (2 * (1 + 5e-6), {"tp": 2}, "", ""),
        (3, {"tp": 2}, "", ""),
        (1.0, {"tp": 2}, "", ""),
        (0.0, {"tp": 2}, "", ""),
        (-1.0, {}, "sign", ""),
    ],
)
def test_a_factor_may_be_a_degree_or_a_product_of_few_or_the_samples(
    factor: float, degrees: dict[str, int], named: str, value: str
) -> None:
    text = factor_text(trial_with(batch=12, dims=ParallelDims(**degrees)), factor)
    assert named in text and value in text and bool(named) == bool(text)


def test_the_number_of_samples_is_none_of_some_parameters() -> None:
    assert factor_text(trial_with(batch=12), 12, everywhere=False) == ""
