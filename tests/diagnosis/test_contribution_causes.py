"""Samples that contribute unequally to a gradient: microbatches lost, means taken in the wrong place. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    accumulating,
    dims,
    expect,
    expect_first,
    fsdp_4,
    in_noise,
    samples_of,
    with_own_samples,
    with_scaled_samples,
)
from literal import (
    judged,
    sum_of_samples,
    tiny_case,
    trial_of,
    with_step_1_gradients,
)

from harness.diagnosis.data import _mask_is_off
from harness.diagnosis.gradients import (
    _mean_over_none,
    wrong_gradients,
)
from harness.judge import attribution
from harness.judge.result import Verdict
from harness.judge.trial import Trial


def test_the_first_microbatch_lost() -> None:
    expect(
        with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)),
        """\
microbatches 1 of 2 do not contribute to the gradient (weights 0, 1)
  gradients: rank 0, step 1, tok_embeddings.weight: -0.2895 times the reference's by best fit
  gradients: rank 1, step 1, tok_embeddings.weight: -0.2895 times the reference's by best fit
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_the_last_microbatch_lost() -> None:
    expect_first(
        with_scaled_samples(accumulating(), dict.fromkeys((2, 3, 6, 7), 0.0)),
        """microbatches 2 of 2 do not contribute to the gradient (weights 1, 0)""",
    )


def test_a_microbatch_counted_twice() -> None:
    expect_first(
        with_scaled_samples(accumulating(), dict.fromkeys((2, 3, 6, 7), 2.0)),
        """microbatches contribute with weights 1, 2 to the gradient, each should have 1""",
    )


def test_a_reduction_that_is_dropped_in_every_microbatch_is_not_taken_for_one_that_lacks_some() -> None:
    trial = with_own_samples(accumulating(), {0: [0], 1: [1]}, ())
    expect_first(
        trial,
        """gradient reduction without effect over dp_replicate: rank 0's gradient holds the samples of rank 0 only, though collectives ran""",
    )


def test_a_microbatch_lost_in_bfloat16_is_named_within_its_noise() -> None:
    trial = in_noise(with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)))
    found = wrong_gradients(trial, {"gradients": judged("gradients", trial)})
    assert found is not None
    assert found.cause == "microbatches 1 of 2 do not contribute to the gradient (weights 0, 1)"


def test_noise_alone_is_no_unequal_count_of_samples() -> None:
    trial = in_noise(accumulating())
    assert judged("gradients", trial).verdict is Verdict.PASS
    weights = attribution.sample_weights(trial, [0, 1])
    assert weights is not None and weights.explained and weights.uniform == pytest.approx(1, abs=0.02)


def averaged(trial: Trial, pieces: list[list[int]], factor: float = 1.0) -> Trial:
    """Each piece divides its loss by its own number of valid tokens, and the pieces' means are averaged."""
    tokens = (trial.reference.labels >= 0).sum(axis=1)
    own = {i: max(1, tokens[piece].sum()) for piece in pieces for i in piece}  # without tokens: no gradient either
    weights = {i: factor * tokens[:8].sum() / len(pieces) / count for i, count in own.items()}
    return with_scaled_samples(trial, weights)


def test_loss_averaged_per_rank() -> None:
    expect_first(
        averaged(accumulating(), [[0, 1, 2, 3], [4, 5, 6, 7]]),
        """the loss is averaged per rank: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_without_accumulation() -> None:
    expect_first(
        averaged(fsdp_4(), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        """the loss is averaged per rank: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_where_a_rank_has_one_sample() -> None:
    expect_first(
        averaged(trial_of(tiny_case(dims(2, 4))), [[i] for i in range(8)]),
        """the loss is averaged per rank or sample: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_microbatch_of_each_rank() -> None:
    expect_first(
        averaged(accumulating(), [[0, 1], [2, 3], [4, 5], [6, 7]]),
        """the loss is averaged per microbatch of each rank: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_microbatch_over_all_ranks() -> None:
    expect_first(
        averaged(accumulating(), [[0, 1, 4, 5], [2, 3, 6, 7]]),
        """the loss is averaged per microbatch: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_sample() -> None:
    expect_first(
        averaged(accumulating(), [[i] for i in range(8)]),
        """the loss is averaged per sample: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_and_summed_over_them() -> None:
    expect_first(
        averaged(fsdp_4(), [[0, 1], [2, 3], [4, 5], [6, 7]], factor=4.0),
        """the loss is averaged per rank: each divides by its own number of valid tokens, and gradients are 4 times that: not divided by dp_shard (4)""",
    )


def test_samples_that_count_unequally_for_no_known_reason() -> None:
    expect_first(
        with_scaled_samples(fsdp_4(), {0: 0.0, 1: 1.5, 7: 0.5}),
        """samples count unequally in the gradient: weights 0 to 1.5, 1 of 7 do not count at all, each should have 1""",
    )


def test_a_microbatch_that_is_added_after_the_reduction() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    own = {rank: samples_of(trial, rank) for rank in trial.ranks}

    def gradient(rank: int, fqn: str) -> np.ndarray:
        ids = own[1 - rank]
        return sum_of_samples(trial, fqn, dict.fromkeys(ids[len(ids) // 2 :], 0.0) | dict.fromkeys(own[rank][2:], 2.0))

    expect_first(
        with_step_1_gradients(trial, gradient),
        """gradients of microbatch 2 of 2 are not reduced over dp_replicate: each rank adds its own only""",
    )


@pytest.mark.parametrize(("silent", "told"), [((3,), "rank 3 has"), ((1, 3), "ranks [1,3] have")])
def test_ranks_without_a_valid_token_are_named(silent: tuple[int, ...], told: str) -> None:
    trial = fsdp_4()
    labels = trial.reference.labels.copy()
    for rank in silent:
        labels[2 * rank : 2 * rank + 2] = -100
    trial = replace(trial, reference=replace(trial.reference, labels=labels))
    assert _mean_over_none(trial) == f": {told} no valid token, and a mean over none is 0/0"


def test_a_label_of_token_0_is_a_valid_one() -> None:
    assert _mask_is_off([(1, 0, 3)]) == _mask_is_off([(1, 3, 0)]) == ""
    trial = fsdp_4()
    labels = np.where(trial.reference.labels >= 0, 0, -100)
    assert _mean_over_none(replace(trial, reference=replace(trial.reference, labels=labels))) == ""
