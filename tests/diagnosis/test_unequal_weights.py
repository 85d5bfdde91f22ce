"""What is proposed of samples, tokens and microbatches that count unequally, with what is said, and where nothing is."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    LAST,
    accumulating,
    dims,
    fsdp_4,
    in_noise,
    proposed,
    received,
    reference_gradient,
    scaled,
    with_own_samples,
    with_scaled_samples,
)
from literal import ADAMW, sum_of_samples, tiny_case, trial_of, with_step_1_gradients
from weighed import SIXTEEN, fit_of, with_labels

from harness.diagnosis.contributions import _by_microbatch, _of_all_ranks, _unequal_text, unequal_contributions
from harness.diagnosis.mixture import Pieces
from harness.judge.trial import Trial
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims


def of_gradients(trial: Trial) -> list[str]:
    return proposed(unequal_contributions, trial, "gradients")


FIRST_LOST = dict.fromkeys((0, 1, 4, 5), 0.0)
LOST = "microbatch 1 of 2 does not contribute to the gradient (weights 0, 1)"
LATE = "the gradient of microbatch 1 of 2 comes one step late: it is added to the next step's gradient"

# ---- where nothing is proposed


def test_nothing_is_proposed_of_gradients_that_fail_no_check() -> None:
    lost = with_scaled_samples(accumulating(), FIRST_LOST)
    assert proposed(unequal_contributions, lost, "loss") == []
    assert of_gradients(accumulating()) == []
    assert of_gradients(lost) == [LOST, f"{LOST} in step 1 alone", LATE]


def test_where_ranks_are_assumed_to_train_apart_nothing_is_fitted_to_one_reference() -> None:
    lost = with_scaled_samples(accumulating(), FIRST_LOST)
    assert of_gradients(lost.assuming(references=dict.fromkeys(lost.ranks, lost.reference))) == []


def test_gradients_that_are_scaled_alike_are_left_to_those_who_know_factors_but_in_noise() -> None:
    trial = scaled("ddp_2", 0.5, accumulation=2)
    assert of_gradients(trial) == []
    halves = "microbatches contribute to the gradient with weights 0.5, 0.5, requested 1 each"
    assert halves in of_gradients(in_noise_alike(trial))


def in_noise_alike(trial: Trial) -> Trial:
    """Replicas have one gradient, noise and all."""
    noisy = in_noise(trial)
    return with_step_1_gradients(noisy, lambda _, fqn: noisy.ranks[0].steps[0].gradients[fqn])


def test_where_ranks_received_other_samples_it_is_not_known_what_counts() -> None:
    assert of_gradients(with_scaled_samples(fsdp_4(), {0: 0.0, 1: 1.5})) != []
    assert of_gradients(received(with_scaled_samples(fsdp_4(), {0: 0.0, 1: 1.5}), 1, 1, [0, 1])) == []


def test_gradients_that_are_no_mixture_are_none_of_unequal_samples() -> None:
    trial = fsdp_4()
    assert of_gradients(with_step_1_gradients(trial, lambda _, fqn: np.cos(reference_gradient(trial, fqn)))) == []


def test_weights_of_no_rule_are_proposed_where_no_noise_can_have_made_them() -> None:
    uneven = with_scaled_samples(accumulating(), {0: 0.0, 1: 1.5, 7: 0.5})
    told = "samples count unequally in the gradient: weights 0 to 1.5, 1 of 7 do not count at all, requested 1 each"
    found = list(_of_all_ranks(fit_of(uneven, np.array([-0.0, 1.5, 1, 1, 1, 1, 1, 0.5]))))
    assert of_gradients(uneven) == [told, f"{told} in step 1 alone"]
    assert [(cause_line(one.cause), one.fitted) for one in found] == [(told, 4), (f"{told} in step 1 alone", 5)]
    assert of_gradients(in_noise_alike(uneven)) == []


def test_where_each_rank_has_weights_of_its_own_reductions_are_what_is_proposed() -> None:
    alone = with_own_samples(accumulating(), {0: [0], 1: [1]}, ())
    held = "rank 0's gradient holds only the samples of rank 0, though collectives ran"
    told = "gradient reduction over dp_replicate has no effect{}: " + held
    assert of_gradients(alone) == [told.format(""), told.format(" in step 1 alone")]


# ---- where and when


def test_a_microbatch_that_is_lost_in_one_parameter_does_not_come_late() -> None:
    trial = accumulating()

    def lost(rank: int, fqn: str) -> np.ndarray:
        return sum_of_samples(trial, fqn, FIRST_LOST) if fqn == LAST else reference_gradient(trial, fqn)

    where = " in 1 of 12 parameters (output.weight)"
    found = of_gradients(with_step_1_gradients(trial, lost))
    assert found == [LOST + where, f"{LOST}{where} in step 1 alone"]


def test_a_microbatch_that_is_lost_from_a_later_step_on_does_not_come_late() -> None:
    found = list(_of_all_ranks(fit_of(accumulating(), np.array([0.0, 0, 3, 3, 0, 0, 3, 3]), step=2)))
    told = "microbatch 1 of 2 does not contribute to the gradient (weights 0, 3)"
    assert [(cause_line(one.cause), one.fitted) for one in found] == [
        (f"{told} from step 2 on", 2),
        (f"{told} in step 2 alone", 3),
    ]


def test_several_microbatches_come_late_together() -> None:
    trial = trial_of(tiny_case("ddp_2", SIXTEEN, accumulation=4))
    kept = [piece.row // 2 in (1, 3) for piece in Pieces(trial).all]
    found = [
        (one.cause.kind, cause_line(one.cause), one.fitted) for one in _of_all_ranks(fit_of(trial, np.array(kept)))
    ]
    lost = "microbatches 1, 3 of 4 do not contribute to the gradient (weights 0, 1, 0, 1)"
    late = "the gradients of microbatches 1, 3 of 4 come one step late: they are added to the next step's gradient"
    kind = "unequal contributions"
    assert found == [(kind, lost, 1), (kind, f"{lost} in step 1 alone", 2), (kind, late, 2)]


def test_a_gradient_of_zeros_is_lost_and_does_not_come_late() -> None:
    told = "microbatches 1, 2 of 2 do not contribute to the gradient (weights 0, 0)"
    zeros = in_noise(with_scaled_samples(accumulating(), dict.fromkeys(range(8), 0.0)))
    assert of_gradients(zeros) == [told, f"{told} in step 1 alone"]


# ---- microbatches


def test_weights_of_microbatches_are_whole_numbers_where_noise_lets_them_be() -> None:
    trial = accumulating()
    weights = np.array([-0.004, 0.006, 1.997, 2.005, 0.003, -0.007, 1.996, 2.002])
    (found,) = _by_microbatch(fit_of(trial, weights, close=0.01))
    assert cause_line(found.cause) == "microbatch 1 of 2 does not contribute to the gradient (weights 0, 2)"
    assert found.weights(1).tolist() == [0, 0, 2, 2, 0, 0, 2, 2] and found.fitted == 2
    assert not list(_by_microbatch(fit_of(trial, weights, close=0.001)))


def test_of_one_microbatch_or_of_one_without_tokens_no_weights_are_told() -> None:
    assert not list(_by_microbatch(fit_of(fsdp_4(), np.full(8, 2.0))))
    trial = trial_of(tiny_case("ddp_2", SIXTEEN, accumulation=4))
    first = np.arange(48) % 8 < 2
    silent = with_labels(trial, np.where(first[:, None], -100, trial.reference.labels))
    assert not list(_by_microbatch(fit_of(silent, np.full(16, 2.0))))
    assert list(_by_microbatch(fit_of(trial, np.full(16, 2.0))))


# ---- what is said of weights of no rule


@pytest.mark.parametrize(
    ("weights", "told"),
    [
        ([1.5, 0.25, 1, 1, 1, 1, 1, 1], "weights 0.25 to 1.5, requested 1 each"),
        ([1.23456, 0.5, 1, 1, 1, 1, 1, 1], "weights 0.5 to 1.235, requested 1 each"),
        ([-1e-12, 0.5, 1, 1e-12, 1, 1, 1, 2], "weights 0 to 2, 2 of 8 do not count at all, requested 1 each"),
        ([3e-10, 0.5, 1, 1, 1, 1, 1, 2], "weights 0 to 2, 1 of 8 do not count at all, requested 1 each"),
        ([1e-8, 0.5, 1, 1, 1, 1, 1, 2], "weights 1e-08 to 2, requested 1 each"),
    ],
)
def test_the_span_of_weights_is_told_and_how_many_do_not_count(weights: list[float], told: str) -> None:
    trial = fsdp_4()
    labelled = with_labels(trial, np.ones_like(trial.reference.labels))
    assert _unequal_text(fit_of(labelled, np.array(weights))) == f"samples count unequally in the gradient: {told}"


@pytest.mark.parametrize(("step", "told"), [(1, "0.5 to 2"), (2, "0.5 to 3")])
def test_samples_without_a_valid_token_in_the_wrong_step_have_no_weight(step: int, told: str) -> None:
    trial = fsdp_4()
    silent = np.isin(np.arange(24), (3, 8 + 5))  # one sample of each of two steps
    labels = np.where(silent[:, None], -100, 1)
    weights = np.array([1.0, 0.5, 1, 3, 1, 2, 1, 1])  # of step 1 the fourth does not count, of step 2 the sixth
    said = f"samples count unequally in the gradient: weights {told}, requested 1 each"
    assert _unequal_text(fit_of(with_labels(trial, labels), weights, step)) == said


@pytest.mark.parametrize(
    ("off", "told"),
    [
        (1e-7, "tokens count unequally in the gradient: weights 2, 0.5 by cp rank, requested 1 each"),
        (1e-4, "samples count unequally in the gradient: weights 0.5 to 2, requested 1 each"),
    ],
)
def test_weights_by_cp_rank_are_told_as_such_whatever_those_without_tokens_have(off: float, told: str) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=8)))
    pieces = Pieces(trial)
    labels = trial.reference.labels.copy()
    labels[7] = -100
    silent = with_labels(trial, labels)
    weights = np.array([2.0 if piece.place == 0 else 0.5 for piece in pieces.all])
    weights[0] += off
    weights[-2:] = 1.0
    assert _unequal_text(fit_of(silent, weights)) == told


def test_one_place_alone_has_no_cp_ranks_to_tell_apart() -> None:
    told = "samples count unequally in the gradient: weights 2 to 2, requested 1 each"
    assert _unequal_text(fit_of(trial_of(tiny_case(dims(shard=4))), np.full(8, 2.0))) == told
