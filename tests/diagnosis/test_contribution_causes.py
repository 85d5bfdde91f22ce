"""Samples that contribute unequally to a gradient: microbatches lost, means taken in the wrong place. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    accumulating,
    diagnosis_text,
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

from harness.checks import judge
from harness.diagnosis.backward import _mean_over_none
from harness.diagnosis.contributions import unequal_contributions
from harness.diagnosis.engine import explain
from harness.diagnosis.mixture import Pieces, mixture_of
from harness.judge.result import Verdict
from harness.judge.trial import Trial


def test_the_first_microbatch_lost() -> None:
    expect(
        with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)),
        """\
microbatch 1 of 2 does not contribute to the gradient (weights 0, 1)
  assuming this: 2 of 2 broken laws hold, and none that held breaks
  loss: equal to the reference exactly: a loss-curve test passes here""",
    )


def test_the_last_microbatch_lost() -> None:
    expect_first(
        with_scaled_samples(accumulating(), dict.fromkeys((2, 3, 6, 7), 0.0)),
        """microbatch 2 of 2 does not contribute to the gradient (weights 1, 0)""",
    )


def test_a_microbatch_counted_twice() -> None:
    expect_first(
        with_scaled_samples(accumulating(), dict.fromkeys((2, 3, 6, 7), 2.0)),
        """microbatches contribute to the gradient with weights 1, 2, requested 1 each""",
    )


def test_a_reduction_that_is_dropped_in_every_microbatch_is_not_taken_for_one_that_lacks_some() -> None:
    trial = with_own_samples(accumulating(), {0: [0], 1: [1]}, ())
    expect_first(
        trial,
        """gradient reduction over dp_replicate has no effect: rank 0's gradient holds only the samples of rank 0, though collectives ran""",
    )


def in_noise_of(trial: Trial) -> list[str]:
    """A literal run reduces in one dtype whatever is requested, and noise is drawn for each rank: that is not looked at."""
    apart = ("replica_agreement", "features", "traffic", "update")
    results = [result for result in judge(trial) if result.check not in apart]
    found = explain(trial, results, (unequal_contributions,), ())
    return [one.cause.text for proof in found.proofs if proof.complete for one in proof.hypotheses]


def test_a_microbatch_lost_in_bfloat16_is_named_within_its_noise() -> None:
    told = "microbatch 1 of 2 does not contribute to the gradient (weights 0, 1)"
    assert in_noise_of(in_noise(with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)))) == [told]


def test_noise_alone_is_no_unequal_count_of_samples() -> None:
    trial = in_noise(accumulating())
    assert judged("gradients", trial).verdict is Verdict.PASS
    mixture = mixture_of(trial, Pieces(trial), 1)
    assert mixture is not None
    assert all(np.allclose(weights, 1, atol=0.02) for weights in mixture.weights.values())


def test_noise_is_no_mixture_of_samples() -> None:
    trial, draw = fsdp_4(), np.random.default_rng(1)
    noise = {fqn: draw.standard_normal(shape) for fqn, shape in trial.plan.shapes.items()}
    wrong = with_step_1_gradients(trial, lambda _, fqn: trial.reference.steps[0].gradients[fqn] + noise[fqn])
    assert mixture_of(wrong, Pieces(wrong), 1) is None


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


@pytest.mark.parametrize(
    ("pieces", "unit"),
    [([[0, 1, 4, 5], [2, 3, 6, 7]], "microbatch"), ([[0, 1], [2, 3], [4, 5], [6, 7]], "microbatch of each rank")],
)
def test_a_microbatch_lost_and_the_loss_averaged_locally_are_both_named(pieces: list[list[int]], unit: str) -> None:
    """Beside a constant weight, where one step alone is wrong and tells nothing of how it varies."""
    first, tokens = {0, 1, 4, 5}, (accumulating().reference.labels >= 0).sum(axis=1)
    shares = {i: tokens[:8].sum() / len(pieces) / tokens[piece].sum() for piece in pieces for i in piece}
    trial = with_scaled_samples(accumulating(), {i: 0.0 if i in first else share for i, share in shares.items()})
    local = f"the loss is averaged per {unit}: each divides by its own number of valid tokens"
    assert f"microbatch 1 of 2 does not contribute to the gradient; {local}" in diagnosis_text(trial)


def test_loss_averaged_per_sample() -> None:
    expect_first(
        averaged(accumulating(), [[i] for i in range(8)]),
        """the loss is averaged per sample: each divides by its own number of valid tokens, not by the global one""",
    )


def test_loss_averaged_per_rank_and_summed_over_them() -> None:
    expect_first(
        averaged(fsdp_4(), [[0, 1], [2, 3], [4, 5], [6, 7]], factor=4.0),
        """the number of valid tokens is not summed over dp_shard: each rank divides by its own""",
    )


def test_samples_that_count_unequally_for_no_known_reason() -> None:
    expect_first(
        with_scaled_samples(fsdp_4(), {0: 0.0, 1: 1.5, 7: 0.5}),
        """samples count unequally in the gradient: weights 0 to 1.5, 1 of 7 do not count at all, requested 1 each""",
    )


def test_a_microbatch_that_is_added_after_the_reduction() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    own = {rank: samples_of(trial, rank) for rank in trial.ranks}

    def gradient(rank: int, fqn: str) -> np.ndarray:
        ids = own[1 - rank]
        return sum_of_samples(trial, fqn, dict.fromkeys(ids[len(ids) // 2 :], 0.0) | dict.fromkeys(own[rank][2:], 2.0))

    expect_first(
        with_step_1_gradients(trial, gradient),
        """gradients of microbatch 2 of 2 are not reduced over dp_replicate: each rank adds only its own""",
    )


@pytest.mark.parametrize(("silent", "told"), [((3,), "rank 3 has"), ((1, 3), "ranks [1,3] have")])
def test_ranks_without_a_valid_token_are_named(silent: tuple[int, ...], told: str) -> None:
    trial = fsdp_4()
    labels = trial.reference.labels.copy()
    for rank in silent:
        labels[2 * rank : 2 * rank + 2] = -100
    trial = replace(trial, reference=replace(trial.reference, labels=labels))
    assert _mean_over_none(trial, 1) == f": {told} no valid token, and a mean over none is 0/0"


def test_a_label_of_token_0_is_a_valid_one() -> None:
    trial = fsdp_4()
    labels = np.where(trial.reference.labels >= 0, 0, -100)
    assert _mean_over_none(replace(trial, reference=replace(trial.reference, labels=labels)), 1) == ""
