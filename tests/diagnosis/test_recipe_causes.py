"""Numbers of the recipe that the optimizer has otherwise, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

from diagnosed import LOW_CLIP, expect, expect_first, trained_as
from literal import ADAMW, SGD


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
  assuming this: 1 of 1 broken laws hold, and none that held breaks
  loss, gradients: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_another_beta1() -> None:
    expect_first(trained_as(replace(ADAMW, beta1=0.95)), """beta1 is 0.95 in the optimizer, requested 0.9""")


def test_another_beta1_that_nobody_uses() -> None:
    expect(
        trained_as(replace(ADAMW, beta1=0.876)),
        """\
update: rank 0, step 2, tok_embeddings.weight: expected entry (2, 3) moved by -0.00336019, observed moved by -0.00323439 (ratio 0.9625612237); 16 of 16 entries wrong
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
