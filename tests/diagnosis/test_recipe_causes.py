"""Numbers of the recipe that the optimizer has otherwise, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from diagnosed import LOW_CLIP, expect, expect_first, trained_as
from literal import ADAMW, SGD, tiny_case, trained_otherwise, trial_of
from literal_reference import clip

from harness.diagnosis.algorithms import other_algorithms, other_numbers
from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.words import Arrays
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line


def test_weight_decay_left_out() -> None:
    expect_first(trained_as(replace(ADAMW, weight_decay=0.0)), """weight decay is not applied, requested 0.1""")


def test_weight_decay_left_out_of_sgd() -> None:
    expect_first(
        trained_as(replace(SGD, weight_decay=0.0), requested=SGD), """weight decay is not applied, requested 0.1"""
    )


def test_the_librarys_default_of_weight_decay() -> None:
    expect_first(trained_as(replace(ADAMW, weight_decay=0.01)), """weight decay is 0.01, requested 0.1""")


def test_weight_decay_that_is_not_multiplied_by_the_learning_rate() -> None:
    uneven = replace(ADAMW, lr=0.03)
    told = "weight decay is 3.33333, the requested one divided by the learning rate, requested 0.1"
    expect_first(trained_as(replace(uneven, weight_decay=0.1 / 0.03), requested=uneven), told)


def test_the_librarys_default_of_beta2() -> None:
    expect(
        trained_as(replace(ADAMW, beta2=0.999)),
        """\
beta2 is 0.999 in the optimizer, requested 0.95
  assuming this: 1 of 1 failing checks pass, and no passing check fails
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_beta1() -> None:
    expect_first(trained_as(replace(ADAMW, beta1=0.95)), """beta1 is 0.95 in the optimizer, requested 0.9""")


def test_another_beta1_that_nobody_uses() -> None:
    expect(
        trained_as(replace(ADAMW, beta1=0.876)),
        """\
update: rank 0, step 2, the optimizer's step of tok_embeddings.weight: expected -0.0033601920098840707, observed -0.0032343905330598013 (entry (2, 3), ratio 0.9625612237; 16 of 16 entries wrong; bound 9.4e-16)
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_eps() -> None:
    expect_first(trained_as(replace(ADAMW, eps=1e-5)), """eps is 1e-05 in the optimizer, requested 1e-08""")


def test_another_limit_of_the_norm() -> None:
    expect_first(
        trained_as(replace(LOW_CLIP, max_norm=0.5), requested=LOW_CLIP),
        """the gradient norm's limit is 0.5 in the optimizer, requested 0.25""",
    )


def test_two_numbers_that_are_swapped_are_told_as_that_and_others_are_not() -> None:
    swapped = replace(ADAMW, beta1=0.95, beta2=0.9)
    told = "beta1 is 0.95 and beta2 is 0.9 in the optimizer, requested 0.9 and 0.95"
    expect_first(trained_as(swapped), f"{told}: the two are swapped")
    others = replace(ADAMW, beta1=0.95, beta2=0.999)
    expect_first(trained_as(others), "beta1 is 0.95 and beta2 is 0.999 in the optimizer, requested 0.9 and 0.95")


def supposed(trial: Trial, of: Callable[[Trial], Iterator[Hypothesis]]) -> dict[str, int]:
    return {cause_line(one.cause): one.fitted for one in of(trial)}


def test_a_number_is_two_choices_and_each_further_one_another() -> None:
    """Which number it is, and which value."""
    assert supposed(trained_as(replace(ADAMW, beta2=0.999)), other_numbers) == {
        "beta2 is 0.999 in the optimizer, requested 0.95": 2
    }
    assert supposed(trained_as(replace(ADAMW, beta1=0.95, beta2=0.9)), other_numbers) == {
        "beta1 is 0.95 and beta2 is 0.9 in the optimizer, requested 0.9 and 0.95: the two are swapped": 3
    }
    for factor in (2, 0.5):
        low = replace(LOW_CLIP, max_norm=0.3)
        trial = trained_as(replace(low, max_norm=factor * 0.3), requested=low)
        told = f"the gradient norm's limit is {factor * 0.3:g} in the optimizer, requested 0.3"
        assert supposed(trial, other_numbers)[told] == 2


def test_another_algorithm_is_one_choice() -> None:
    trial, held = trial_of(tiny_case("fsdp_2")), dict[str, np.ndarray]()

    def late(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        before = {fqn: held.get(fqn, 0 * g) for fqn, g in gradients.items()}
        held.update({fqn: clip(norm, ADAMW) * g for fqn, g in gradients.items()})
        return before

    told = "each optimizer step uses the gradients of the step before, the first uses none"
    assert supposed(trained_otherwise(trial, given=late), other_algorithms) == {told: 1}
    assert supposed(trial, other_algorithms) == {}
