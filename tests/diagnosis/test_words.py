"""How ranks, groups and parameters are put in words that every cause shares. Literal evidence, no ranks."""

from __future__ import annotations

import pytest
from diagnosed import dims
from literal import tiny_case, trial_of

from harness.diagnosis.words import fed_with, in_parameters, on_ranks, rank_words, some, where_text
from harness.spec.dims import ParallelDims

TRIAL = trial_of(tiny_case("ddp_2"))
FIRST, LAST = "tok_embeddings.weight", "output.weight"


@pytest.mark.parametrize(
    ("names", "told"), [("a", "a"), ("ab", "a, b"), ("abc", "a, b and 1 more"), ("abcde", "a, b and 3 more")]
)
def test_two_names_are_shown_and_others_counted(names: str, told: str) -> None:
    assert some([*names]) == told


def test_ranks_are_told_unless_they_are_all() -> None:
    assert (rank_words([3]), rank_words([0, 1])) == ("rank 3", "ranks [0,1]")
    assert (on_ranks(TRIAL, [1, 1]), on_ranks(TRIAL, [1, 0])) == (" on rank 1", "")


def test_parameters_are_told_in_the_models_order_each_once() -> None:
    assert in_parameters(TRIAL, [LAST, FIRST, LAST]) == f"in 2 of 12 parameters ({FIRST}, {LAST})"
    assert in_parameters(TRIAL, TRIAL.plan.shapes) == "in every parameter"
    assert where_text(TRIAL, [(1, LAST)]) == f"in 1 of 12 parameters ({LAST}) on rank 1"


def test_ranks_that_are_fed_the_same_samples_are_those_of_tp_and_cp() -> None:
    assert fed_with(trial_of(tiny_case(dims(shard=2, tp=2))).plan, [0]) == {0, 1}
    assert fed_with(trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2, tp=2))).plan, [0]) == {0, 1, 2, 3}
    assert fed_with(TRIAL.plan, [0, 1]) == {0, 1}
