"""Samples that contribute unequally to a gradient: microbatches lost or late, means in the wrong place. Literal, no ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pytest
from diagnosed import (
    LAST,
    LOW_CLIP,
    accumulating,
    fsdp_4,
    in_noise,
    kinds,
    proven,
    received,
    reference_gradient,
    scaled,
    with_scaled_samples,
)
from literal import sum_of_samples, tiny_case, trained_otherwise, trial_of, with_step, with_step_1_gradients
from literal_reference import clip

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.engine import explain, failing_checks
from harness.core.causes.hypothesis import Hypothesis
from harness.core.causes.words import Arrays
from harness.core.checks import judge
from harness.core.judge.trial import Trial
from harness.hypotheses.piece_weights import sums_of_pieces

FIRST, SECOND = (0, 1, 4, 5), (2, 3, 6, 7)  # the samples of each microbatch where two ranks have two


def proposed(trial: Trial) -> list[Hypothesis]:
    return list(sums_of_pieces(trial, failing_checks(judge(trial))))


# ---- microbatches


@pytest.mark.parametrize(
    ("first", "second", "lost"), [(0, 1, (1,)), (1, 0, (2,)), (0, 2, (1,)), (1, 3, ()), (0.5, -2, ()), (1.23456, 1, ())]
)
def test_weights_of_microbatches_are_found(first: float, second: float, lost: tuple[int, ...]) -> None:
    wrong = with_scaled_samples(accumulating(), dict.fromkeys(FIRST, first) | dict.fromkeys(SECOND, second))
    kind, details = proven(wrong)
    assert kind == "unequal contributions" and details["microbatches"] == lost and details["steps"] == (1, 2, 3)
    assert details["weights"] == pytest.approx((first, second), abs=1e-9)


def test_a_microbatch_that_is_lost_in_one_parameter_is_found_with_it_and_does_not_come_late() -> None:
    trial = accumulating()

    def lost(rank: int, fqn: str) -> np.ndarray:
        one = sum_of_samples(trial, fqn, dict.fromkeys(FIRST, 0.0))
        return one if fqn == LAST else reference_gradient(trial, fqn)

    wrong = with_step_1_gradients(trial, lost)
    assert proven(wrong)[1]["parameters"] == (LAST,)
    assert not any("steps late" in dict(one.cause.details) for one in proposed(wrong))
    everywhere = proposed(with_scaled_samples(trial, dict.fromkeys(FIRST, 0.0)))
    assert any("steps late" in dict(one.cause.details) for one in everywhere)


def test_a_microbatch_lost_is_named_within_noise_and_noise_alone_is_no_unequal_count() -> None:
    lost = in_noise(with_scaled_samples(accumulating(), dict.fromkeys(FIRST, 0.0)))
    assert [found["microbatches"] for found in proven_in_noise(lost)] == [(1,)]
    assert proposed(in_noise(accumulating())) == []


def proven_in_noise(trial: Trial) -> list[dict[str, object]]:
    """A literal run reduces in one dtype whatever is requested, and noise is drawn for each rank: that is not looked at."""
    apart = ("replica_agreement", "features", "traffic", "update")
    results = [result for result in judge(trial) if result.check not in apart]
    found = explain(trial, results, (sums_of_pieces,), ())
    return [dict(one.cause.details) for proof in found.proofs if proof.is_complete for one in proof.hypotheses]


# ---- where nothing is proposed


def test_noise_is_no_sum_of_samples() -> None:
    trial, draw = fsdp_4(), np.random.default_rng(1)
    noise = {fqn: draw.standard_normal(shape) for fqn, shape in trial.plan.shapes.items()}
    wrong = with_step_1_gradients(trial, lambda _, fqn: reference_gradient(trial, fqn) + noise[fqn])
    assert proposed(wrong) == [] and kinds(wrong) == ("not explained",)


def test_where_all_is_scaled_or_ranks_have_other_samples_or_references_of_their_own_nothing_is_fitted() -> None:
    uneven = with_scaled_samples(fsdp_4(), {0: 0.0, 1: 1.5})
    assert [dict(one.cause.details)["steps"] for one in proposed(uneven)] == [
        (1, 2, 3)
    ]  # one step is no test of weights
    assert proposed(scaled("ddp_2", 0.5, accumulation=2)) == []
    assert proposed(received(uneven, 1, 1, [0, 1])) == []
    assert proposed(uneven.with_assumption(references=dict.fromkeys(uneven.ranks, uneven.reference))) == []


def test_weights_of_no_rule_are_found_where_no_noise_can_have_made_them() -> None:
    uneven = with_scaled_samples(accumulating(), {0: 0.0, 1: 1.5, 7: 0.5})
    kind, details = proven(uneven)
    assert kind == "unequal contributions"
    assert (details["least weight"], details["largest weight"]) == pytest.approx((0.0, 1.5), abs=1e-9)
    noisy = in_noise(uneven)
    alike = with_step_1_gradients(noisy, lambda _, fqn: noisy.ranks[0].steps[0].gradients[fqn])
    assert not proven_in_noise(alike)


# ---- means that are taken in the wrong place


def averaged(trial: Trial, pieces: Sequence[Sequence[int]], factor: float = 1.0) -> Trial:
    """Each piece divides its loss by its own number of valid tokens, and the pieces' means are averaged."""
    tokens = (trial.reference.labels >= 0).sum(axis=1)
    own = {
        i: max(1, tokens[list(piece)].sum()) for piece in pieces for i in piece
    }  # without tokens: no gradient either
    return with_scaled_samples(trial, {i: factor * tokens[:8].sum() / len(pieces) / count for i, count in own.items()})


PER_RANK, ONE_BY_ONE = [[0, 1], [2, 3], [4, 5], [6, 7]], [[i] for i in range(8)]
MANY = ParallelDims(dp_replicate=2, dp_shard=4)


@pytest.mark.slow("many of a kind; the first run in the same way", after=2)
@pytest.mark.parametrize(
    ("trial", "pieces", "units"),
    [
        (accumulating(), [[0, 1, 2, 3], [4, 5, 6, 7]], ("dp_replicate rank",)),
        (fsdp_4(), PER_RANK, ("dp_shard rank",)),
        (trial_of(tiny_case(MANY)), ONE_BY_ONE, ("dp_shard and dp_replicate rank", "sample")),
        (trial_of(tiny_case(MANY)), [[0, 1, 2, 3], [4, 5, 6, 7]], ("dp_replicate rank",)),
        (trial_of(tiny_case(MANY)), [[0, 4], [1, 5], [2, 6], [3, 7]], ("dp_shard rank",)),
        (accumulating(), PER_RANK, ("microbatch of each rank",)),
        (accumulating(), [FIRST, SECOND], ("microbatch",)),
        (accumulating(), ONE_BY_ONE, ("sample",)),
    ],
)
def test_a_loss_that_is_averaged_locally_is_named_with_who_divides(
    trial: Trial, pieces: list[list[int]], units: tuple[str, ...]
) -> None:
    for factor in (1.0, float(len(pieces)), 3.0):
        kind, details = proven(averaged(trial, pieces, factor))
        assert (kind, details["units"]) == ("averaged locally", units)
        assert details["factor"] == pytest.approx(factor, rel=1e-9)


def reporting(trial: Trial, divided: dict[int, int], steps: tuple[int, ...] = (1,)) -> Trial:
    """Each rank reports the sum of all losses over so many times its own valid tokens, in these steps."""
    for rank, step in itertools.product(trial.ranks, steps):
        seen = {other: evidence.steps[step - 1].microbatches for other, evidence in trial.ranks.items()}
        total = sum(part.loss_sum or 0.0 for parts in seen.values() for part in parts)
        own = sum(part.valid_tokens or 0 for part in seen[rank])
        trial = with_step(trial, rank, step, reported_loss=total / (divided[rank] * own))
    return trial


@pytest.mark.parametrize(("factor", "divided"), [(1.0, 4), (4.0, 1)])
def test_what_ranks_report_that_divide_by_a_count_of_their_own_follows_from_it(factor: float, divided: int) -> None:
    trial = averaged(fsdp_4(), PER_RANK, factor)
    assert proven(reporting(trial, dict.fromkeys(range(4), divided), steps=(1, 2)))[0] == "averaged locally"
    other = reporting(trial, dict.fromkeys(range(3), divided) | {3: divided + 1})
    found = diagnose(other, judge(other))
    assert found is not None and all("reported_loss" not in one.explains for one in found.causes)


# ---- clipped in every microbatch


def clipped_after_every_microbatch(trial: Trial, chains: int) -> dict[int, float]:
    """What samples of step 1 count where sums of one chain, or of each data rank's, are clipped as they add up."""
    firsts, weights = [FIRST] if chains == 1 else [FIRST[:2], FIRST[2:]], dict[int, float]()
    for own in firsts:  # the samples of first microbatches; of those that are averaged, each is as much larger
        only = dict.fromkeys(range(8), 0.0) | dict.fromkeys(own, float(chains))
        norm = math.sqrt(sum(float(np.sum(sum_of_samples(trial, fqn, only) ** 2)) for fqn in trial.plan.shapes))
        assert norm > (LOW_CLIP.max_norm or 0)
        weights |= dict.fromkeys(own, clip(norm, LOW_CLIP))
    return weights


@pytest.mark.parametrize("twice", [False, True])
@pytest.mark.parametrize("chains", [1, 2])
def test_gradients_clipped_after_every_microbatch_while_they_add_up(chains: int, twice: bool) -> None:
    trial = trial_of(tiny_case("ddp_2", LOW_CLIP, accumulation=2))
    weights, norms = clipped_after_every_microbatch(trial, chains), dict[int, float]()

    def gradients(step: int, own: Arrays) -> Arrays:
        return {fqn: sum_of_samples(trial, fqn, weights) for fqn in own} if step == 1 else own

    def given(step: int, gradients: Arrays, norm: float, parameters: Arrays) -> Arrays:
        norms[step] = norm * clip(norm, LOW_CLIP) if twice else norm  # what the clipping of the step finds, and reports
        again = clip(norms[step], LOW_CLIP) if twice else 1.0
        return {fqn: again * clip(norm, LOW_CLIP) * g for fqn, g in gradients.items()}

    wrong = trained_otherwise(trial, gradients=gradients, given=given)
    for rank, step, _ in list(wrong.steps_with_reference()):
        wrong = with_step(wrong, rank, step.step, grad_norm=norms[step.step])
    assert proven(wrong) == ("clipped in every microbatch", {"each rank": chains == 2, "once more": twice})
