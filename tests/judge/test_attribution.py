"""How much each sample counted in a gradient: fitted, and never read out of numbers that say too little."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import in_noise
from literal import EIGHT, tiny_case, trial_of, with_step, with_step_1_gradients

from harness.evidence.records import Microbatch
from harness.judge import attribution
from harness.judge.attribution import EXPLAINED, Weights, by_microbatch, local_average, sample_weights
from harness.judge.trial import Trial
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims

WEIGHT = "layers.0.attention.wq.weight"
SINGLE = trial_of(tiny_case("single"))
DDP_2 = trial_of(tiny_case("ddp_2"))


def with_reference(trial: Trial, **changes) -> Trial:
    return replace(trial, reference=replace(trial.reference, **changes))


def with_gradient(trial: Trial, factors: dict[str, float]) -> Trial:
    """The reference's gradient of each parameter, of which some are scaled."""
    full = trial.reference.steps[0].gradients
    return with_step_1_gradients(trial, lambda rank, fqn: factors.get(fqn, 1.0) * full[fqn])


def keeping(trial: Trial, count: int) -> Trial:
    """A reference that keeps so many numbers of one parameter, and none of others."""
    reference = trial.reference
    parts = {WEIGHT: reference.sample_gradients[WEIGHT][:, :count]}
    return with_reference(
        trial, sample_gradients=parts, sample_positions={WEIGHT: reference.sample_positions[WEIGHT][:count]}
    )


# ---- the fit


def test_as_many_numbers_as_samples_say_nothing_and_one_more_does() -> None:
    samples = len(SINGLE.reference.samples[0])
    assert sample_weights(keeping(SINGLE, samples), [0]) is None
    found = sample_weights(keeping(SINGLE, samples + 1), [0])
    assert found is not None and found.explained and found.uniform == pytest.approx(1.0)


def test_a_run_that_begins_after_step_1_has_no_weights() -> None:
    assert sample_weights(trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()),))), [0, 1]) is None


def test_a_parameter_of_small_gradients_is_explained_as_well_as_others() -> None:
    small = 1e-9
    steps = [
        replace(s, gradients={f: g * (small if f == WEIGHT else 1.0) for f, g in s.gradients.items()})
        for s in SINGLE.reference.steps
    ]
    parts = {f: g * (small if f == WEIGHT else 1.0) for f, g in SINGLE.reference.sample_gradients.items()}
    trial = with_reference(SINGLE, steps=tuple(steps), sample_gradients=parts)
    right, wrong = (sample_weights(with_gradient(trial, {WEIGHT: factor}), [0]) for factor in (1.0, 3.0))
    assert right is not None and right.explained
    assert wrong is not None and not wrong.explained


def test_a_parameter_whose_gradient_is_zero_is_no_trouble() -> None:
    steps = [replace(s, gradients=s.gradients | {WEIGHT: 0 * s.gradients[WEIGHT]}) for s in SINGLE.reference.steps]
    parts = SINGLE.reference.sample_gradients | {WEIGHT: 0 * SINGLE.reference.sample_gradients[WEIGHT]}
    trial = with_gradient(with_reference(SINGLE, steps=tuple(steps), sample_gradients=parts), {})
    found = sample_weights(trial, [0])
    assert found is not None and found.explained and found.uniform == pytest.approx(1.0)


def test_gradients_that_are_all_zero_hold_nobodys_samples() -> None:
    trial = with_step_1_gradients(SINGLE, lambda rank, fqn: 0 * SINGLE.reference.steps[0].gradients[fqn])
    found = sample_weights(trial, [0])
    assert found is not None and (found.residual, found.uniform) == (0.0, 0.0)


def test_what_need_not_be_explained_is_rounding_or_the_recipes_noise() -> None:
    exact, noisy = sample_weights(DDP_2, [0, 1]), sample_weights(blurred := in_noise(DDP_2), [0, 1])
    assert exact is not None and exact.noise == EXPLAINED
    assert noisy is not None and noisy.noise == blurred.bounds.gradient[1] == 4e-2


def test_noise_is_that_of_step_1() -> None:
    blurred = in_noise(DDP_2)
    assert blurred.golden is not None
    noise = {key: replace(one, gradient=(1e-2, 5e-2, 5e-2)) for key, one in blurred.golden.noise.items()}
    found = sample_weights(replace(blurred, golden=replace(blurred.golden, noise=noise)), [0, 1])
    assert found is not None and found.noise == 4e-2


def test_cp_ranks_hold_eighths_of_the_length_of_step_1() -> None:
    eight = trial_of(tiny_case(ParallelDims(cp=2), replace(EIGHT, variable_length=True)))  # of 4 tokens in step 2
    twelve, sixteen = (trial_of(tiny_case(ParallelDims(cp=2), replace(EIGHT, seq_len=n))) for n in (12, 16))
    for trial in (eight, sixteen):
        assert [attribution._eighths(trial, place) for place in (0, 1)] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    assert attribution._eighths(twelve, 0) is None


# ---- who divided by what


def test_a_label_of_zero_counts_and_a_masked_one_does_not() -> None:
    labels = SINGLE.reference.labels.copy()
    labels[0], labels[1] = (0, 0, 5, -100), -100
    trial = with_reference(SINGLE, labels=labels)
    counts = attribution.valid_tokens(trial)
    assert (counts[0], counts[1]) == (3, 0)
    with pytest.raises(ValueError):
        attribution.valid_tokens(with_reference(SINGLE, labels=labels[1:]))


def test_a_rank_without_a_valid_token_does_not_contribute() -> None:
    labels = DDP_2.reference.labels.copy()
    labels[4:8] = -100
    assert attribution.ranks_with_labels(with_reference(DDP_2, labels=labels)) == [0]


def averaged_by_rank(trial: Trial, factor: float = 1.0) -> dict[int, float]:
    """The weights of samples if each rank divides by its own number of valid tokens."""
    tokens, samples = attribution.valid_tokens(trial), trial.reference.samples[0]
    total = sum(tokens[i] for i in samples)
    shares = (samples[:4], samples[4:])
    return {i: factor * total / (2 * sum(tokens[j] for j in share)) for share in shares for i in share if tokens[i]}


def test_weights_that_are_those_of_local_averages_give_the_factor_between() -> None:
    weights = averaged_by_rank(DDP_2, 0.5)
    assert local_average(DDP_2, Weights(weights, 0.0), "rank") == pytest.approx(0.5)
    assert local_average(DDP_2, Weights(weights, 0.0), "sample") is None
    assert local_average(DDP_2, Weights(dict.fromkeys(weights, 0.0), 0.0), "rank") is None


def test_weights_are_as_close_as_what_is_left_unexplained() -> None:
    weights = averaged_by_rank(DDP_2)
    off = weights | {0: weights[0] * (1 + 5e-6)}
    assert local_average(DDP_2, Weights(off, 0.0), "rank") is None
    assert local_average(DDP_2, Weights(off, 1e-5), "rank") == pytest.approx(1.0)


def test_a_sample_of_nobody_is_nobodys_average() -> None:
    weights = averaged_by_rank(DDP_2)
    assert local_average(DDP_2, Weights(weights | {99: 1.0}, 0.0), "rank") is None
    labels = DDP_2.reference.labels.copy()
    labels[4:8] = -100
    silent = with_reference(DDP_2, labels=labels)
    weights = dict.fromkeys(range(4), 0.5) | dict.fromkeys(range(4, 8), 1.0)
    assert local_average(silent, Weights(weights, 0.0), "rank") is None


def test_the_samples_of_one_microbatch_have_one_weight_or_it_has_none() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    even = dict.fromkeys(range(8), 1.0) | dict.fromkeys((2, 3, 6, 7), 0.5)
    assert by_microbatch(trial, Weights(even, 0.0)) == pytest.approx([1.0, 0.5])
    assert by_microbatch(trial, Weights(even | {0: 1 + 9e-6}, 0.0)) is None
    assert by_microbatch(trial, Weights(even | {0: 1 + 9e-6}, 1e-5)) == pytest.approx([1.0, 0.5], rel=1e-5)


def test_ranks_that_ran_different_numbers_of_microbatches_have_none_in_common() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    (first, *_) = trial.ranks[1].steps
    fewer: tuple[Microbatch, ...] = first.microbatches[:1]
    with pytest.raises(ValueError):
        by_microbatch(with_step(trial, 1, 1, microbatches=fewer), Weights(dict.fromkeys(range(8), 1.0), 0.0))


def test_weights_far_from_each_other_are_not_uniform() -> None:
    assert Weights({0: 1.0, 1: 1.0 + 1e-7}, 0.0).uniform == pytest.approx(1.0)
    assert Weights({0: 1.0, 1: 1.0 + 1e-5}, 0.0).uniform is None
    assert np.array_equal(Weights({3: 1.0, 5: 0.5}, 0.0).values, [1.0, 0.5])
