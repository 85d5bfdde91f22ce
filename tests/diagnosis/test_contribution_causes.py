"""Samples that contribute unequally to a gradient: microbatches lost, means taken in the wrong place. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

import itertools
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
    with_step,
    with_step_1_gradients,
)
from weighed import fit_of, weights_of

from harness.checks import judge
from harness.diagnosis import hypothesis
from harness.diagnosis.backward import _mean_over_none
from harness.diagnosis.contributions import _of_all_ranks, unequal_contributions
from harness.diagnosis.engine import explain, failing_checks
from harness.diagnosis.mixture import Pieces, mixture_of
from harness.judge.result import Verdict
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line


def test_the_first_microbatch_lost() -> None:
    expect(
        with_scaled_samples(accumulating(), dict.fromkeys((0, 1, 4, 5), 0.0)),
        """\
microbatch 1 of 2 does not contribute to the gradient (weights 0, 1)
  assuming this: 2 of 2 failing checks pass, and no passing check fails
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
    return [cause_line(one.cause) for proof in found.proofs if proof.complete for one in proof.hypotheses]


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


# ---- what is reported of it


def reporting(trial: Trial, divided: dict[int, int], steps: tuple[int, ...] = (1,)) -> Trial:
    """Each rank reports the sum of all losses over so many times its own valid tokens, in these steps."""
    for rank, step in itertools.product(trial.ranks, steps):
        seen = {other: evidence.steps[step - 1].microbatches for other, evidence in trial.ranks.items()}
        total = sum(part.loss_sum or 0.0 for parts in seen.values() for part in parts)
        own = sum(part.valid_tokens or 0 for part in seen[rank])
        trial = with_step(trial, rank, step, reported_loss=total / (divided[rank] * own))
    return trial


PER_RANK = [[0, 1], [2, 3], [4, 5], [6, 7]]
LOCAL = "the loss is averaged per rank: each divides by its own number of valid tokens"


@pytest.mark.parametrize(
    ("factor", "divided", "told"),
    [
        (1.0, 4, f"{LOCAL}, not by the global one"),
        (4.0, 1, "the number of valid tokens is not summed over dp_shard: each rank divides by its own"),
    ],
)
def test_what_ranks_report_that_divide_by_a_count_of_their_own_follows_from_it(
    factor: float, divided: int, told: str
) -> None:
    trial = reporting(averaged(fsdp_4(), PER_RANK, factor), dict.fromkeys(range(4), divided))
    assert explained(trial) == [(told, 1, True), (f"{told} in step 1 alone", 2, True)]


@pytest.mark.parametrize(
    ("factor", "divided", "told"),
    [
        (1.0, 2, f"{LOCAL}, not by the global one"),
        (2.0, 1, "the number of valid tokens is not summed over dp_replicate: each rank divides by its own"),
    ],
)
def test_what_ranks_report_of_a_count_of_their_own_follows_from_it_in_noise_too(
    factor: float, divided: int, told: str
) -> None:
    trial = averaged(accumulating(), [[0, 1, 2, 3], [4, 5, 6, 7]], factor)
    trial = in_noise(reporting(trial, dict.fromkeys(range(2), divided)))
    reduced = trial.ranks[0].steps[0].gradients  # replicas have one gradient, noise and all
    assert in_noise_of(with_step(trial, 1, 1, gradients=reduced)) == [told]


def explained(trial: Trial) -> list[tuple[str, int, bool]]:
    """What is proposed, fitted of how many choices, and whether all failing checks pass if it is so."""
    results = judge(trial)
    found = [
        (one, hypothesis.tested(trial, results, one)) for one in unequal_contributions(trial, failing_checks(results))
    ]
    return [(cause_line(one.cause), one.fitted, bool(proof and proof.complete)) for one, proof in found]


def test_reports_of_other_steps_do_not_follow_from_one_step_alone() -> None:
    trial = reporting(averaged(fsdp_4(), PER_RANK), dict.fromkeys(range(4), 4), steps=(1, 2))
    told = f"{LOCAL}, not by the global one"
    assert explained(trial) == [(told, 1, True), (f"{told} in step 1 alone", 2, False)]


def test_reports_of_later_steps_follow_from_what_begins_with_them() -> None:
    trial = reporting(fsdp_4(), dict.fromkeys(range(4), 4), steps=(2, 3))
    weights = weights_of(trial, lambda piece: piece.rank, step=2)
    told = f"{LOCAL}, not by the global one"
    found = {
        cause_line(one.cause): one.assume(trial).assumption.reports
        for one in _of_all_ranks(fit_of(trial, weights, step=2))
    }
    assert {text: [*reports] for text, reports in found.items()} == {
        f"{told} from step 2 on": ["reported_loss"],
        f"{told} in step 2 alone": [],
    }


def test_other_reports_do_not_follow_from_means_of_one_s_own() -> None:
    trial = reporting(averaged(fsdp_4(), PER_RANK), {0: 4, 1: 4, 2: 4, 3: 1})
    told = f"{LOCAL}, not by the global one"
    assert explained(trial) == [(told, 1, False), (f"{told} in step 1 alone", 2, False)]


# ---- what is proposed


@pytest.mark.parametrize(
    ("weights", "told", "fitted"),
    [
        ((0, 1), "microbatch 1 of 2 does not contribute to the gradient (weights 0, 1)", 1),
        ((0, 2), "microbatch 1 of 2 does not contribute to the gradient (weights 0, 2)", 2),
        ((1, 3), "microbatches contribute to the gradient with weights 1, 3, requested 1 each", 2),
        ((0.5, -2), "microbatches contribute to the gradient with weights 0.5, -2, requested 1 each", 3),
        ((1.23456, 1), "microbatches contribute to the gradient with weights 1.235, 1, requested 1 each", 2),
    ],
)
def test_weights_of_microbatches_are_told_and_counted(weights: tuple[float, float], told: str, fitted: int) -> None:
    first, second = weights
    each = {id_: float(first if id_ in (0, 1, 4, 5) else second) for id_ in range(8)}
    found = explained(with_scaled_samples(accumulating(), each))
    assert found[:2] == [(told, fitted, True), (f"{told} in step 1 alone", fitted + 1, True)]
    late = "the gradient of microbatch 1 of 2 comes one step late: it is added to the next step's gradient"
    assert [text for text, _, _ in found[2:]] == ([late] if first == 0 else [])
