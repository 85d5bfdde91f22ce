"""The reference loop learns, clips, schedules and tells what it did."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.data import build_dataset, document_indices
from harness.reference.model import initial_weights, llama_from
from harness.reference.train import (
    ReferenceRun,
    ReferenceStep,
    clip_gradients,
    forward_loss,
    learning_rate,
    lr_factor,
    stack_samples,
    train,
)

DEBUG, RECIPE = ModelConfig(), TrainingConfig()


@pytest.fixture(scope="module")
def run() -> ReferenceRun:
    return train(DEBUG, RECIPE)


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def same(one: ReferenceRun, two: ReferenceRun) -> bool:
    """Bitwise: repr of a float is exact, arrays are compared by their bytes."""

    def flat(value: object) -> object:
        if isinstance(value, np.ndarray):
            return value.dtype.str, value.shape, value.tobytes()
        if isinstance(value, dict):
            return {key: flat(item) for key, item in value.items()}
        return [flat(item) for item in value] if isinstance(value, (tuple, list)) else repr(value)

    return all(
        flat(getattr(one, name)) == flat(getattr(two, name))
        for name in ("weights", "samples", "sample_ids", "tokens", "labels")
    ) and all(flat(vars(a)) == flat(vars(b)) for a, b in zip(one.steps, two.steps, strict=True))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_loss_falls_by_a_nat_in_thirty_steps(dtype: str) -> None:
    losses = [step.loss for step in train(DEBUG, TrainingConfig(steps=30, dtype=dtype)).steps]
    assert np.mean(losses[:3]) - np.mean(losses[-3:]) > 1.0


def test_training_twice_is_bitwise_equal(run: ReferenceRun) -> None:
    assert same(run, train(DEBUG, RECIPE))


def test_another_seed_is_another_run(run: ReferenceRun) -> None:
    assert not same(run, train(DEBUG, replace(RECIPE, seed=1)))


def test_training_draws_no_global_random_number() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    train(DEBUG, RECIPE, steps=1)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_first_loss_is_the_mean_over_the_valid_tokens_of_the_whole_batch(run: ReferenceRun) -> None:
    dataset = build_dataset(RECIPE, DEBUG)
    _, labels = zip(*(dataset[i] for i in run.samples[0]), strict=True)
    assert run.steps[0].valid_tokens == sum(int((row != -100).sum()) for row in labels)
    assert abs(run.steps[0].loss - math.log(256)) < 1  # untrained: near a uniform guess


def test_sgd_takes_the_clipped_gradient_and_weight_decay_off_the_weights(run: ReferenceRun) -> None:
    training = replace(RECIPE, optimizer="sgd", warmup_steps=0)
    first = train(DEBUG, training).steps[0]
    weights = {fqn: value - first.lr * change(first, fqn, value, training) for fqn, value in run.weights.items()}
    assert all(relative(first.parameters[fqn], weights[fqn]) < 1e-14 for fqn in weights)
    assert first.optimizer_state == {}


def change(step: ReferenceStep, fqn: str, value: np.ndarray, training: TrainingConfig) -> np.ndarray:
    """SGD: the clipped gradient plus weight decay times the weight."""
    assert training.max_norm is not None
    scale = min(1.0, training.max_norm / (step.grad_norm + 1e-6))
    return scale * step.gradients[fqn] + training.weight_decay * value


def test_each_step_starts_from_the_parameters_the_last_one_left(run: ReferenceRun) -> None:
    dataset = build_dataset(RECIPE, DEBUG)
    for before, after, ids in zip(run.steps, run.steps[1:], run.samples[1:], strict=False):
        model = llama_from(before.parameters, config=DEBUG, dtype=torch.float64)
        loss = forward_loss(model, *stack_samples(dataset, ids, "cpu")) / after.valid_tokens
        assert loss.item() == after.loss


def test_adamws_moments_and_step_are_the_published_ones(run: ReferenceRun) -> None:
    step = run.steps[0]
    scale = min(1.0, 1.0 / (step.grad_norm + 1e-6))
    for fqn, weight in run.weights.items():
        gradient = scale * step.gradients[fqn]
        assert relative(step.optimizer_state[fqn]["exp_avg"], 0.1 * gradient) < 1e-14
        assert relative(step.optimizer_state[fqn]["exp_avg_sq"], 0.05 * gradient**2) < 1e-14
        stepped = weight * (1 - step.lr * 0.1) - step.lr * gradient / (np.abs(gradient) + 1e-8)
        assert relative(step.parameters[fqn], stepped) < 1e-14


def test_the_displayed_gradient_norm_is_that_of_the_gradients_before_clipping(run: ReferenceRun) -> None:
    for step in run.steps:
        assert step.grad_norm == pytest.approx(math.sqrt(sum((g**2).sum() for g in step.gradients.values())), rel=1e-13)


@pytest.mark.parametrize("max_norm", [1.0, 5.0, 100.0, None])
def test_clipping_scales_down_to_max_norm_and_never_up(max_norm: float | None) -> None:
    parameters = [torch.nn.Parameter(torch.zeros(2, dtype=torch.float64)) for _ in range(2)]
    parameters[0].grad, parameters[1].grad = torch.tensor([6.0, 0.0]).double(), torch.tensor([0.0, 8.0]).double()
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    for parameter, other in zip(parameters, theirs, strict=True):
        assert parameter.grad is not None
        other.grad = parameter.grad.clone()
    assert clip_gradients(parameters, max_norm) == 10.0
    torch.nn.utils.clip_grad_norm_(theirs, max_norm or math.inf)
    for parameter, other in zip(parameters, theirs, strict=True):
        torch.testing.assert_close(parameter.grad, other.grad, rtol=1e-15, atol=0)
    expected = 10.0 if max_norm in (100.0, None) else max_norm
    assert clip_gradients(parameters, None) == pytest.approx(expected, rel=1e-6)


def test_the_learning_rate_rises_linearly_then_follows_a_cosine_to_its_final_fraction() -> None:
    training = TrainingConfig(steps=10, lr=1.0, warmup_steps=2, final_lr_fraction=0.1)
    assert [round(learning_rate(step, training), 6) for step in range(1, 13)] == [
        0.5,
        1.0,
        0.965746,
        0.868198,
        0.722208,
        0.55,
        0.377792,
        0.231802,
        0.134254,
        0.1,
        0.1,
        0.1,
    ]


def test_the_schedule_holds_at_its_edges() -> None:
    assert lr_factor(1, TrainingConfig(steps=1, warmup_steps=0)) == pytest.approx(0.1)
    assert [lr_factor(s, TrainingConfig(steps=3, warmup_steps=4)) for s in (1, 2, 3)] == [0.25, 0.5, 0.75]
    assert [lr_factor(0, TrainingConfig(steps=3, warmup_steps=warmup)) for warmup in (0, 4)] == [1.0, 0.0]


def test_the_run_reports_the_recipes_learning_rates_also_when_stopped_early(run: ReferenceRun) -> None:
    assert [step.lr for step in run.steps] == [0.0015, 0.003, pytest.approx(0.0003)]
    short = train(DEBUG, RECIPE, steps=2)
    assert [(s.step, s.loss, s.lr) for s in short.steps] == [(s.step, s.loss, s.lr) for s in run.steps[:2]]


def test_the_run_starts_from_the_weights_it_is_given(run: ReferenceRun) -> None:
    weights = initial_weights(DEBUG, 99)
    given = train(DEBUG, RECIPE, weights=weights, steps=1)
    assert all(np.array_equal(given.weights[fqn], weights[fqn]) for fqn in weights)
    assert given.samples[0] == run.samples[0] and given.steps[0].loss != run.steps[0].loss


def test_tokens_and_labels_are_those_of_the_samples_each_once(run: ReferenceRun) -> None:
    assert [len(ids) for ids in run.samples] == [16, 16, 16]
    assert run.sample_ids == tuple(i for ids in run.samples for i in ids)
    assert run.tokens.shape == run.labels.shape == (48, 32)
    repeated = train(DEBUG, replace(RECIPE, steps=65, dtype="float32", seq_len=8, global_batch=2))
    assert len(repeated.sample_ids) == len(set(repeated.sample_ids)) == len(repeated.tokens) == 128


@pytest.mark.parametrize("dtype, held_as", [("float64", "float64"), ("float32", "float32"), ("bfloat16", "float32")])
def test_arrays_have_the_recipes_dtype_and_bfloat16_is_held_as_float32(dtype: str, held_as: str) -> None:
    run = train(DEBUG, replace(RECIPE, dtype=dtype), steps=1)
    step = run.steps[0]
    arrays = [*run.weights.values(), *step.gradients.values(), *step.parameters.values()]
    arrays += [value for state in step.optimizer_state.values() for value in state.values()]
    assert {str(array.dtype) for array in arrays} == {held_as}
    if dtype == "bfloat16":
        assert all(np.array_equal(a, torch.tensor(a).bfloat16().float().numpy()) for a in arrays)


def test_tied_embeddings_train_as_one_parameter() -> None:
    run = train(ModelConfig(tied_embeddings=True), RECIPE, steps=1)
    assert "output.weight" not in run.steps[0].gradients
    assert (np.abs(run.steps[0].gradients["tok_embeddings.weight"]).max(axis=1) > 0).all()


def test_with_decay_of_matrices_norm_weights_move_by_their_gradient_alone(run: ReferenceRun) -> None:
    training = replace(RECIPE, optimizer="sgd", warmup_steps=0, decay="matrices")
    first = train(DEBUG, training, steps=1).steps[0]
    for fqn, value in run.weights.items():
        recipe = replace(training, weight_decay=0.0) if fqn.endswith("norm.weight") else training
        assert relative(first.parameters[fqn], value - first.lr * change(first, fqn, value, recipe)) < 1e-14
    assert sum(fqn.endswith("norm.weight") for fqn in run.weights) == 5


def test_adamw_with_decay_of_matrices_shrinks_matrices_only(run: ReferenceRun) -> None:
    other = train(DEBUG, replace(RECIPE, decay="matrices"), steps=1).steps[0]
    for fqn, decayed in run.steps[0].parameters.items():
        kept = decayed + run.steps[0].lr * 0.1 * run.weights[fqn] * fqn.endswith("norm.weight")
        assert relative(other.parameters[fqn], kept) < 1e-14


def test_a_step_of_half_length_is_one_of_which_the_second_halfs_labels_are_ignored(run: ReferenceRun) -> None:
    """A later token moves no earlier logit, so that whole rows give the same loss."""
    first, second, third = train(DEBUG, replace(RECIPE, variable_length=True)).steps
    assert first.loss == run.steps[0].loss and third.valid_tokens == run.steps[2].valid_tokens
    tokens, labels = stack_samples(build_dataset(RECIPE, DEBUG), run.samples[1], "cpu")
    labels[:, 16:] = -100
    assert second.valid_tokens == int((labels >= 0).sum())
    model = llama_from(first.parameters, config=DEBUG, dtype=torch.float64)
    assert second.loss == pytest.approx(forward_loss(model, tokens, labels).item() / second.valid_tokens, rel=1e-14)


def test_with_a_document_mask_each_document_is_read_as_if_alone(run: ReferenceRun) -> None:
    """One row holds three documents, the first two each with the separator that ends it; positions count on."""
    row, ends = torch.tensor([[7, 9, 0, 5, 6, 7, 8, 0, 3, 4]]), (0, 3, 8, 10)
    model = llama_from(run.weights, config=DEBUG, dtype=torch.float64)
    together = model(row, documents=document_indices(row))
    for start, stop in zip(ends, ends[1:], strict=False):
        alone = model(row[:, start:stop], torch.arange(start, stop))
        torch.testing.assert_close(together[:, start:stop], alone, rtol=1e-12, atol=1e-12)
    assert (model(row) - together)[:, 3:].abs().max() > 1e-2


def test_with_a_document_mask_training_goes_by_it(run: ReferenceRun) -> None:
    masked = train(DEBUG, replace(RECIPE, document_mask=True), steps=1)
    first, tokens, labels = masked.steps[0], *stack_samples(build_dataset(RECIPE, DEBUG), run.samples[0], "cpu")
    model = llama_from(run.weights, config=DEBUG, dtype=torch.float64)
    total = sum(loss_of_documents_alone(model, *both) for both in zip(tokens, labels, strict=True))
    assert first.loss == pytest.approx(total / first.valid_tokens, rel=1e-12)


def loss_of_documents_alone(model: torch.nn.Module, tokens: torch.Tensor, labels: torch.Tensor) -> float:
    starts = [0, *(index + 1 for index, token in enumerate(tokens.tolist()) if token == 0), len(tokens)]
    parts = [slice(start, stop) for start, stop in zip(starts, starts[1:], strict=False) if stop > start]
    return sum(forward_loss(model, tokens[None, part], labels[None, part]).item() for part in parts)


def test_samples_without_a_label_add_nothing() -> None:
    run = train(DEBUG, replace(RECIPE, masked_samples=True), steps=1)
    assert run.steps[0].valid_tokens == int((run.labels >= 0).sum()) and math.isfinite(run.steps[0].loss)


@pytest.mark.parametrize(
    "wrong, told",
    [
        ({"variable_length": True, "seq_len": 31}, "seq_len must be even, got 31"),
        ({"masked_samples": True, "data": "t.npy"}, "no label of a token file is masked"),
    ],
)
def test_options_that_do_not_fit_are_refused(wrong: dict[str, object], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        TrainingConfig(**wrong)  # type: ignore[arg-type]
