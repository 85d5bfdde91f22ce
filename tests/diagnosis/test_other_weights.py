"""What is proposed of ranks that start from other weights, or whose weights become a mean of earlier ones."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from diagnosed import NORM, broken
from literal import tiny_case, trial_of, with_parameter, with_rank

from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.weights import (
    ANEW,
    _instead,
    _of_earlier_ones,
    _start_alike,
    observed_weights,
    other_weights,
    rounded_to,
)
from harness.judge.contents import take
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims

QUERY, OUT = "layers.0.attention.wq.weight", "layers.0.attention.wo.weight"
FSDP = trial_of(tiny_case("fsdp_2"))
FOUR = trial_of(tiny_case(ParallelDims(dp_shard=4)))
HSDP = trial_of(tiny_case("hsdp_2x2"))


def with_held(trial: Trial, rank: int, fqn: str, change: Callable[[np.ndarray], np.ndarray]) -> Trial:
    value = next(tensor.value for tensor in trial.ranks[rank].parameters if tensor.fqn == fqn)
    return with_parameter(trial, rank, fqn, value=change(value))


def of_all(trial: Trial, changes: dict[str, Callable[[np.ndarray], np.ndarray]]) -> Trial:
    for rank in trial.ranks:
        for fqn, change in changes.items():
            trial = with_held(trial, rank, fqn, change)
    return trial


def proposed(trial: Trial) -> Hypothesis:
    (one,) = other_weights(trial, broken("initial_weights"))
    return one


# ---- the weights that ranks start from


def test_the_reference_is_trained_from_the_weights_seen() -> None:
    trial = with_held(FSDP, 1, QUERY, lambda value: value + 1)
    one = proposed(trial)
    assert (one.fitted, one.seen) == (1, ("initial_weights", "shard_contents"))
    assert isinstance(one.assume, partial)
    part = trial.plan.slices[1][QUERY]
    for fqn, value in one.assume.keywords["weights"].items():
        expected = trial.reference.weights[fqn].copy()
        if fqn == QUERY:
            take(expected, part)[...] += 1
        np.testing.assert_array_equal(value, expected)
    assert observed_weights(FSDP) is not None and list(other_weights(trial, broken("loss"))) == []


def without_its_slice(trial: Trial) -> Trial:
    slices = [dict(of_rank) for of_rank in trial.plan.slices.values()]
    del slices[1][QUERY]
    return replace(trial, plan=replace(trial.plan, slices=dict(enumerate(slices))))


@pytest.mark.parametrize(
    "trial",
    [
        with_held(HSDP, 3, QUERY, lambda value: value + 1),
        with_held(FSDP, 1, QUERY, lambda value: value[:1]),
        without_its_slice(FSDP),
    ],
    ids=["another one on a replica", "another shape", "what the rank should not have"],
)
def test_where_slices_do_not_fit_together_nothing_is_assumed_and_all_numbers_may_follow(trial: Trial) -> None:
    assert observed_weights(trial) is None
    wrong = with_held(trial, 0, NORM, lambda value: value + 1)
    one = proposed(wrong)
    assert one.assume is None and {"gradients", "loss", "initial_weights"} <= {*one.seen}
    assert one.lines[-1] == (
        "not tested",
        "whether all wrong numbers follow from this: the slices that ranks start from do not fit together,"
        " and no reference tells what follows",
    )


def test_weights_that_a_repeat_starts_from_too_are_not_drawn_anew() -> None:
    wrong = of_all(FSDP, {QUERY: np.cos, OUT: np.cos})
    other = of_all(FSDP, {QUERY: np.sin, OUT: np.cos})
    everywhere = of_all(FSDP, {QUERY: np.sin, OUT: np.sin})
    for repeat, hint in ((None, ""), (wrong, ""), (other, ""), (everywhere, ANEW)):
        one = proposed(replace(wrong, repeat=None if repeat is None else repeat.run))
        assert one.cause.hint == hint
        assert ("determinism" in one.seen) is (hint == ANEW)


def test_up_to_four_factors_are_told_with_their_parameters() -> None:
    names = [fqn for fqn in FSDP.plan.shapes if fqn.startswith("layers.0") and "norm" not in fqn]
    factors = {fqn: 2.0 + at % 4 for at, fqn in enumerate(names)}
    times = {fqn: partial(np.multiply, factor) for fqn, factor in factors.items()}
    assert proposed(of_all(FSDP, times)).cause.hint == (
        "they are multiples of the seed's: 2 (layers.0.attention.wq.weight, layers.0.feed_forward.w1.weight),"
        " 3 (layers.0.attention.wk.weight, layers.0.feed_forward.w2.weight),"
        " 4 (layers.0.attention.wv.weight, layers.0.feed_forward.w3.weight), 5 (layers.0.attention.wo.weight)"
    )
    assert proposed(of_all(FSDP, times | {OUT: np.negative, QUERY: partial(np.multiply, 7.0)})).cause.hint == ""
    assert proposed(of_all(FSDP, {QUERY: times[QUERY], OUT: np.cos})).cause.hint == ""
    assert proposed(of_all(FSDP, {QUERY: np.zeros_like, OUT: times[OUT]})).cause.hint == ""
    assert proposed(of_all(FSDP, {QUERY: times[QUERY]})).cause.hint == "they are 2 times the seed's"


def test_values_of_another_parameter_are_told_where_all_are_some_others() -> None:
    weights = FSDP.reference.weights
    trial = FSDP
    for rank, (fqn, other) in ((rank, pair) for rank in (0, 1) for pair in ((QUERY, OUT), (OUT, QUERY))):
        part = trial.plan.slices[rank][fqn]
        trial = with_parameter(trial, rank, fqn, value=take(weights[other], part).copy())
    assert proposed(trial).cause.hint == f"{QUERY} holds the values of {OUT}"
    assert proposed(of_all(trial, {NORM: np.cos})).cause.hint == ""


WANTED = np.array([[1.0, 2.0, 4.0], [3.0, 1e-12, 5.0]])


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (2 * WANTED, "they are 2 times the seed's"),
        (2 * WANTED * (1 + np.array([[1e-8, 0, 0], [0, 0, 0]])), ""),
        (2 * WANTED + np.array([[0, 0, 0], [0, 1e-12, 0]]), ""),
        (np.array([7.0, 7.0]), "they are all 7"),
        (np.array([7.0, 8.0]), ""),
        (np.array([7.0]), ""),
        (np.array([7.0, 6.0]) * 2, ""),
    ],
)
def test_what_weights_are_instead(value: np.ndarray, told: str) -> None:
    assert _instead(value, WANTED) == told


def test_what_has_another_shape_was_not_rounded() -> None:
    rounded = WANTED.astype(np.float32)
    assert rounded_to((rounded.astype(np.float64), WANTED)) == rounded_to((rounded, WANTED)) == "float32"
    assert rounded_to((rounded.ravel(), WANTED)) == ""


# ---- the same shard


def test_shards_are_alike_where_all_ranks_of_a_group_hold_the_first_ones_bytes() -> None:
    of = {fqn: next(t.value for t in FOUR.ranks[0].parameters if t.fqn == fqn) for fqn in (QUERY, OUT, NORM)}
    trial = FOUR
    for rank in (1, 2, 3):
        trial = with_held(trial, rank, QUERY, lambda _: of[QUERY])
    assert _start_alike(FOUR, (0, 1, 2, 3)) == set()
    assert _start_alike(trial, (0, 1, 2, 3)) == {QUERY}
    assert _start_alike(with_held(trial, 3, QUERY, np.cos), (0, 1, 2, 3)) == set()
    constant = of_all(trial, {OUT: np.ones_like})
    assert _start_alike(constant, (0, 1, 2, 3)) == {QUERY}
    whole = of_all(trial, {OUT: lambda _: FOUR.reference.weights[OUT]})
    assert OUT not in _start_alike(whole, (0, 1, 2, 3))
    lost = with_rank(trial, 2, parameters=tuple(t for t in trial.ranks[2].parameters if t.fqn != QUERY))
    assert _start_alike(lost, (0, 1, 2, 3)) == set()
    assert _start_alike(without_its_slice(trial), (0, 1, 2, 3)) == set()
    assert _start_alike(HSDP, (0, 2)) == set(), "replicas hold the same"


# ---- a mean of the weights so far


def averaged(
    step: int, shares: tuple[float, ...], times: float = 1.0
) -> tuple[Trial, dict[tuple[int, str], np.ndarray]]:
    """What both ranks have of each parameter after a step."""
    found = {}
    for rank, evidence in FSDP.ranks.items():
        each = [{tensor.fqn: tensor.value for tensor in evidence.parameters}]
        each += [one.parameters for one in evidence.steps[:step]]
        for fqn in each[0]:
            found[rank, fqn] = times * sum(by * of[fqn] for by, of in zip(shares, each, strict=True))
    return FSDP, found


def test_the_shares_of_a_mean_are_those_of_the_largest_parameter() -> None:
    trial, found = averaged(2, (0.25, 0.0, 0.75))
    told = "to a mean of those before training (0.25), after step 2 (0.75), "
    smallest_first = dict(sorted(found.items(), key=lambda item: item[1].size))
    largest_first = dict(reversed(smallest_first.items()))
    assert _of_earlier_ones(trial, 2, smallest_first) == _of_earlier_ones(trial, 2, largest_first) == told
    assert _of_earlier_ones(trial, 2, averaged(2, (0.0, 1.0, 0.0))[1]) == "to those after step 1, "
    assert _of_earlier_ones(trial, 2, averaged(2, (0.5, 0.0, 0.0))[1]) == "", "what adds up to a half is no mean"
    small = averaged(2, (5e-5, 0.0, 1 - 5e-5))[1]
    assert _of_earlier_ones(trial, 2, small) == "to those after step 2, ", "a share below 1e-4 is not told"


def test_a_mean_fits_every_parameter_but_for_rounding() -> None:
    trial, found = averaged(2, (0.25, 0.0, 0.75))
    at = (1, QUERY)
    largest = float(np.abs(found[at]).max())
    eps = np.finfo(np.float64).eps

    def off_by(amount: float) -> str:
        moved = found[at].copy()
        moved.flat[0] += amount
        return _of_earlier_ones(trial, 2, found | {at: moved})

    assert off_by(32 * eps * largest) != ""
    assert off_by(200 * eps * largest) == off_by(1e-9) == ""


@pytest.mark.parametrize(("step", "size", "known"), [(1, 2, False), (2, 8, True), (3, 8, False), (3, 16, True)])
def test_of_few_numbers_no_mean_is_fitted(step: int, size: int, known: bool) -> None:
    """More than two of each share, of which there is one more than steps."""
    trial, found = averaged(step, (0.25, *(0.75 * (at == step) for at in range(1, step + 1))))
    some = {at: value for at, value in found.items() if value.size <= size}
    assert max(value.size for value in some.values()) == size
    assert (_of_earlier_ones(trial, step, some) != "") is known
