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


def said(step: int, factor: float) -> dict[str, list[float]]:
    """By text, the factor that there would be in each step."""
    return {text: [by_step(at) for at in VALID] for text, by_step in _of_tokens(trial_with(), step, factor)}


@pytest.mark.parametrize(
    ("step", "factor", "wanted"),
    [
        (3, 40, {"not divided by the number of valid tokens (40)": [10, 20, 40]}),
        (2, 1 / 20, {"divided an extra time by the number of valid tokens (20)": [1 / 10, 1 / 20, 1 / 40]}),
        (3, 64, {"not divided by the number of all tokens (64)": [16, 32, 64]}),
        (2, 1 / 32, {"divided an extra time by the number of all tokens (32)": [1 / 16, 1 / 32, 1 / 64]}),
        (2, 20 / 32, {"divided by the number of all tokens, not of the valid ones": [10 / 16, 20 / 32, 40 / 64]}),
        (
            3,
            2,
            {
                "divided by the number of valid tokens of step 2 (20, not 40)": [0.5, 1, 2],
                "divided by the number of valid tokens of the step before (20, not 40)": [1, 2, 2],
            },
        ),
        (
            2,
            2,
            {
                "divided by the number of valid tokens of step 1 (10, not 20)": [1, 2, 4],
                "divided by the number of valid tokens of the step before (10, not 20)": [1, 2, 2],
            },
        ),
        (1, 0.25, {"divided by the number of valid tokens of step 3 (40, not 10)": [0.25, 0.5, 1]}),
        (1, 7, {}),
    ],
)
def test_a_factor_is_told_by_the_numbers_of_tokens_whose_quotient_it_is(
    step: int, factor: float, wanted: dict[str, list[float]]
) -> None:
    assert {text: pytest.approx(steps) for text, steps in said(step, factor).items()} == wanted


def test_a_number_that_differs_from_step_to_step_is_told_with_what_it_is_in_each() -> None:
    told = [(text, by_step(2)) for text, by_step in token_factors(trial_with(), 1, 10)]
    assert told == [(": not divided by the number of valid tokens (10)", 20)]
    assert factor_text(trial_with(), 10) == ""
    same = trial_with({1: 10, 2: 10})
    assert list(token_factors(same, 2, 10)) == []
    assert factor_text(same, 10) == ": as if not divided by the number of valid tokens (10)"
    assert factor_text(same, 10, everywhere=False) == ""


def test_one_step_is_no_proof_of_a_number_of_tokens() -> None:
    """What would be wrong in a step before the first wrong one, and what no later step shows, is a coincidence."""
    trial = trial_with({1: 10, 2: 20, 3: 40})
    last = [text for text, _ in token_factors(trial, 3, 2)]
    assert last == [] and {*said(3, 2)} != set()
    before = [text for text, _ in token_factors(trial, 2, 20)]
    assert before == [] and {*said(2, 20)} != set()
    (as_of_step_1, *_) = [by_step for _, by_step in token_factors(trial, 2, 2)]
    assert [as_of_step_1(step) for step in (1, 2, 3)] == [1, 2, 4]


def test_a_factor_may_be_a_degree_or_a_product_of_few_or_the_samples() -> None:
    def told(factor: float, everywhere: bool = True, **degrees: int) -> str:
        return factor_text(trial_with(batch=12, dims=ParallelDims(**degrees)), factor, everywhere)

    assert told(2, dp_shard=2, tp=2) == ": as if not divided by dp_shard or tp (2)"
    assert told(0.25, dp_shard=2, tp=2) == ": as if divided an extra time by dp_shard x tp (4)"
    assert (
        told(2, dp_replicate=2, dp_shard=2, tp=2, cp=2) == ": as if not divided by dp_replicate or dp_shard or cp (2)"
    )
    assert told(12, tp=2) == ": as if not divided by the number of samples (12)"
    assert told(12, False, tp=2) == told(3, tp=2) == told(1.0, tp=2) == told(0.0, tp=2) == ""
    assert told(-1.0) == ": the sign is wrong"
