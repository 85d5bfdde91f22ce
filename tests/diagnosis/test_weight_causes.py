"""Weights that ranks start from, and weights changed after the optimizer's step, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from diagnosed import (
    EMBEDDING,
    NORM,
    broken,
    diagnosis_text,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    here,
)
from literal import (
    tiny_case,
    trial_of,
    with_parameter,
    with_rank,
    with_step,
    with_value,
)

from harness.diagnosis.hypothesis import as_seen
from harness.diagnosis.weights import _instead, changed_weights, other_weights, rearranged, rounded_to
from harness.judge.contents import take
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line

# ---- data


def test_tp_shards_that_are_equal() -> None:
    trial = trial_of(tiny_case("tp_2"))
    for fqn in trial.plan.shapes:
        value = next(t.value for t in trial.ranks[0].parameters if t.fqn == fqn)
        trial = with_parameter(trial, 1, fqn, value=value)
    expect_first(trial, """ranks along tp start from the same shard: rank 1 holds the values of rank 0""")


def with_weights(trial: Trial, change) -> Trial:
    for rank, evidence in trial.ranks.items():
        for tensor in evidence.parameters:
            trial = with_parameter(trial, rank, tensor.fqn, value=change(tensor.value))
    return trial


def test_weights_that_are_not_the_seeds() -> None:
    expect(
        with_weights(fsdp_4(), lambda value: value + 1),
        """\
training does not start from the seed weights in every parameter
  assuming this: 2 of 3 failing checks pass, and no passing check fails
  weights: rank 0, tok_embeddings.weight: off by 1, the largest seed weight is 1.3
  still failing: update: rank 0, step 1, the optimizer's step of tok_embeddings.weight: expected 0.0047678339491875055, observed -0.9947321660508126 (entry (1, 0), ratio -208.6339786; 8 of 8 entries wrong; bound 9.7e-15)
  tried: 1 hypothesis, none explains the rest
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_of_what_follows_from_other_weights_on_one_replica_nothing_is_said_but_that_it_was_not_tested() -> None:
    trial = with_parameter(trial_of(tiny_case("ddp_2")), 1, NORM, value=np.full(4, 3.0))
    for rank in trial.ranks:
        trial = with_value(trial, rank, 1, "gradients", NORM, lambda gradient: gradient + 1)
    text = diagnosis_text(trial)
    assert text.startswith(
        "training does not start from the seed weights in 1 of 12 parameters (norm.weight) on rank 1"
    )
    assert (
        "not tested: whether all wrong numbers follow from this: the slices that ranks start from do not fit together"
        in text
    )
    assert "not explained" not in text and "still failing" not in text


def test_weights_that_each_run_draws_anew() -> None:
    trial = trial_of(tiny_case("fsdp_2", runs=2))
    other = with_weights(trial, lambda value: value + 2)
    trial = with_weights(trial, lambda value: value + 1)
    same = first_line(replace(trial, repeat=trial.run))
    assert same == "training does not start from the seed weights in every parameter"
    expect_first(
        replace(trial, repeat=other.run),
        """training does not start from the seed weights in every parameter: each run draws new ones, as without a seed""",
    )


def test_weights_that_were_rounded() -> None:
    expect(
        with_weights(fsdp_4(), lambda value: value.astype(np.float32).astype(np.float64)),
        """\
training does not start from the seed weights in every parameter: they are the seed's rounded to float32
  assuming this: 2 of 3 failing checks pass, and no passing check fails
  weights: rank 0, tok_embeddings.weight: off by 2.51e-08, the largest seed weight is 1.3
  still failing: update: rank 0, step 1, the optimizer's step of tok_embeddings.weight: expected 0.004937134335888854, observed 0.0049371389238437036 (entry (0, 0), ratio 1.000000929; 8 of 8 entries wrong; bound 2.7e-15)
  tried: 1 hypothesis, none explains the rest
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


def test_one_weight_of_one_rank_that_is_nan() -> None:
    trial = fsdp_4()
    expect(
        with_parameter(trial, 2, NORM, value=np.full(1, np.nan)),
        """\
training does not start from the seed weights in 1 of 12 parameters (norm.weight) on rank 2
  weights: rank 2, norm.weight: not finite
  not explained: finite: rank 2, step 0, value of norm.weight: expected finite numbers, observed NaN or infinity
  tried: 1 hypothesis, none explains the rest
  also failing: update
  loss, gradients: equal to the reference exactly: a loss-curve test passes here
  groups: every group of the plan exists: a listing of process groups passes here""",
    )


# ---- weights


def with_full_weights(trial: Trial, change) -> Trial:
    for rank in trial.ranks:
        for fqn, part in trial.plan.slices[rank].items():
            full = change(fqn, trial.reference.weights[fqn])
            value = full[tuple(slice(*bounds) for bounds in part)].copy()
            trial = with_parameter(trial, rank, fqn, value=value)
    return trial


def test_weights_that_are_a_multiple_of_the_seeds() -> None:
    trial = trial_of(tiny_case("tp_2"))
    larger = lambda fqn, full: full * 2**0.5 if fqn.endswith(("wo.weight", "w2.weight")) else full  # noqa: E731
    expect_first(
        with_full_weights(trial, larger),
        """training does not start from the seed weights in 2 of 12 parameters (layers.0.attention.wo.weight, layers.0.feed_forward.w2.weight): they are 1.41421 times the seed's""",
    )


def test_weights_that_are_constant_are_not_called_equal_shards() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    expect_first(
        with_full_weights(trial, lambda fqn, full: np.ones_like(full) if full.ndim == 1 else full),
        """training does not start from the seed weights in 3 of 12 parameters (layers.0.attention_norm.weight, layers.0.ffn_norm.weight and 1 more): they are all 1""",
    )


def test_weights_that_are_another_parameters() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    query = trial.reference.weights["layers.0.attention.wq.weight"]
    swap = lambda fqn, full: query if fqn == "layers.0.attention.wo.weight" else full  # noqa: E731
    expect_first(
        with_full_weights(trial, swap),
        """training does not start from the seed weights in 1 of 12 parameters (layers.0.attention.wo.weight): layers.0.attention.wo.weight holds the values of layers.0.attention.wq.weight""",
    )


# ---- samples


def test_four_ranks_that_start_from_one_shard_are_told_by_the_first_two() -> None:
    trial = fsdp_4()
    for rank, evidence in trial.ranks.items():
        first = trial.ranks[0].parameters
        parameters = (replace(mine, value=one.value) for mine, one in zip(evidence.parameters, first, strict=True))
        trial = with_rank(trial, rank, parameters=tuple(parameters))
    told = "ranks along dp_shard start from the same shard: rank 1 holds the values of rank 0 in 9 of 12 parameters"
    assert cause_line(next(as_seen(other_weights)(trial, broken("initial_weights"))).cause).startswith(told)


# ---- what happens to weights after the optimizer


def changed_on(step: int, change: Any, *, ranks: tuple[int, ...] = (0, 1)) -> Trial:
    trial = trial_of(tiny_case("ddp_2"))
    for rank in ranks:
        left = trial.ranks[rank].steps[step - 1].parameters
        trial = with_step(trial, rank, step, changed={fqn: change(value) for fqn, value in left.items()})
    return trial


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda left: 0.9 * left, ""),
        (np.zeros_like, "to 0, "),
        (lambda left: left.astype(np.float32), "to another shape or dtype, "),
        (lambda left: left.astype(np.float32).astype(np.float64), "rounded to float32, "),
        (lambda left: left.astype(np.float16).astype(np.float64), "rounded to float16, "),
    ],
)
def test_what_was_done_to_weights_after_the_optimizer_is_told(change: Any, how: str) -> None:
    told = "weights are changed outside the optimizer between steps 1 and 2: {}in every parameter"
    assert first_line(changed_on(1, change)) == told.format(how)


@pytest.mark.parametrize(
    ("shares", "told"),
    [
        ((0.25, 0.25, 0.5), "to a mean of those before training (0.25), after step 1 (0.25), after step 2 (0.5), "),
        ((0.0, 1.0, 0.0), "to those after step 1, "),
        ((0.5, 0.0, 0.0), ""),
    ],
)
def test_weights_that_became_a_mean_of_earlier_ones_are_told_with_its_shares(
    shares: tuple[float, ...], told: str
) -> None:
    trial = changed_on(2, np.zeros_like)
    for rank, evidence in trial.ranks.items():
        starts = {tensor.fqn: tensor.value for tensor in evidence.parameters}
        each = (starts, *(step.parameters for step in evidence.steps[:2]))
        mean = {fqn: sum(by * of[fqn] for by, of in zip(shares, each, strict=True)) for fqn in starts}
        trial = with_step(trial, rank, 2, changed=mean)
    line = "weights are changed outside the optimizer between steps 2 and 3: {}in every parameter"
    assert first_line(trial) == line.format(told)
    odd = {**trial.ranks[1].steps[1].changed, NORM: trial.ranks[1].steps[1].changed[NORM] + 1e-6}
    assert first_line(with_step(trial, 1, 2, changed=odd)) == line.format("")


def test_weights_changed_after_the_last_step_are_told_with_their_rank() -> None:
    told = "weights are changed outside the optimizer after the last step: in every parameter on rank 1"
    assert first_line(changed_on(3, lambda left: 2 * left, ranks=(1,))) == told


def test_gradients_that_were_wrong_before_are_told_beside() -> None:
    trial = changed_on(2, np.zeros_like)
    for rank in (0, 1):
        trial = with_value(trial, rank, 1, "gradients", NORM, lambda gradient: 2 * gradient)
    told = diagnosis_text(trial)
    assert (
        "weights are changed outside the optimizer between steps 2 and 3" in told
        and "norm.weight" in told
        and "gradients" in told
    )


def test_parameters_that_became_different_things_are_told_by_none_of_them() -> None:
    changes = {NORM: lambda value: 0 * value + 1, EMBEDDING: lambda value: 2 * value}
    trial = fsdp_4()
    for rank, fqn in itertools.product(trial.ranks, changes):
        value = next(tensor.value for tensor in trial.ranks[rank].parameters if tensor.fqn == fqn)
        trial = with_parameter(trial, rank, fqn, value=changes[fqn](value))
    told = "training does not start from the seed weights in 2 of 12 parameters (tok_embeddings.weight, norm.weight)"
    assert first_line(trial) == told


MATRIX = np.arange(9.0).reshape(3, 3)


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (MATRIX.T, "they are transposed"),
        (MATRIX[::-1], "their rows are in another order"),
        (MATRIX[:, ::-1], "their columns are in another order"),
        (MATRIX[::-1, ::-1], "their entries are in another order"),
        (MATRIX + 1, ""),
        (MATRIX[:2], ""),
    ],
)
def test_what_became_of_a_matrix_whose_numbers_are_all_there_is_told(value: np.ndarray, told: str) -> None:
    assert rearranged(value.copy(), MATRIX) == told


def test_other_constants_and_factors_are_told_with_their_number() -> None:
    assert _instead(0 * MATRIX + 3, MATRIX) == "they are all 3"
    assert _instead(2 * MATRIX, MATRIX) == "they are 2 times the seed's"
    assert _instead(np.array([[5.0, 1, 1], [1, 1, 1], [1, 1, 1]]), MATRIX) == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_numbers_that_have_been_through_a_dtype_are_known_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """Ties go to the even one of two."""
    ties = [1 + odd * 2.0**-power for power in (8, 11, 24) for odd in (1, 3, 5)]
    value = np.concatenate([np.random.default_rng(0).standard_normal(500), ties, -np.array(ties)])
    rounded = torch.tensor(value).to(dtype).double().numpy()
    assert rounded_to((rounded, value)) == str(dtype).removeprefix("torch.")
    assert rounded_to((rounded, value), (value, value + 1)) == ""
    assert rounded_to((np.nextafter(rounded, 9), value)) == ""


def test_what_was_changed_is_assumed_where_it_was_and_all_else_as_the_optimizer_left_it() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    left = trial.ranks[1].steps[0].parameters
    trial = with_step(trial, 1, 1, changed={**left, NORM: left[NORM] + 1.0})
    (one,) = changed_weights(trial, broken("update"))
    assert (one.fitted, one.seen, one.lines) == (1, ("update",), (here("update"),))
    assert one.assume is not None
    usual, assumed = trial.reference.steps[0].parameters, one.assume(trial).reference.steps[0].parameters
    for fqn, value in usual.items():
        moved = np.zeros_like(value)
        if fqn == NORM:
            take(moved, trial.plan.slices[1][NORM])[...] = 1.0
        np.testing.assert_allclose(assumed[fqn], value + moved, rtol=1e-14)
    assert list(changed_weights(trial, broken("gradients"))) == []
    other = with_step(trial, 1, 1, changed={**left, NORM: left[NORM].astype(np.float32)})
    (misfit,) = changed_weights(other, broken("update"))
    assert misfit.assume is None
