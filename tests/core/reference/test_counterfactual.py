"""The reference trained again with nothing otherwise is the reference, and with something otherwise is that recipe's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from harness.core.judge.order import flatten_reference, reorder_reference
from harness.reference.config import ModelConfig, TrainingConfig
from harness.reference.counterfactual import Batch, Changes, SeparateCopies, retrain, retrain_separately
from harness.reference.record import ReferenceRun
from harness.reference.spellings import replace_forward
from harness.reference.train import train

MODEL = ModelConfig(dim=16, n_layers=1, n_heads=2, n_kv_heads=1, vocab_size=32, ffn_dim=32)
RECIPE = TrainingConfig(global_batch=4, seq_len=8)


@pytest.fixture(scope="module")
def reference() -> ReferenceRun:
    return train(MODEL, RECIPE)


def alike(one: ReferenceRun, other: ReferenceRun) -> bool:
    return all(
        np.isclose(a.loss, b.loss, rtol=1e-12)
        and np.isclose(a.grad_norm, b.grad_norm, rtol=1e-12)
        and a.lr == b.lr
        and all(np.allclose(a.parameters[f], b.parameters[f], rtol=0, atol=1e-12) for f in b.parameters)
        and a.optimizer_state.keys() == b.optimizer_state.keys()
        and all(
            np.allclose(a.optimizer_state[f][k], v, atol=1e-12)
            for f, of in b.optimizer_state.items()
            for k, v in of.items()
        )
        for a, b in zip(one.steps, other.steps, strict=True)
    )


def test_with_nothing_otherwise_it_is_the_same_run(reference: ReferenceRun) -> None:
    threads = torch.get_num_threads()
    assert alike(retrain(MODEL, RECIPE, reference, Changes()), reference)
    assert torch.get_num_threads() == threads


def test_dropout_draws_the_same_masks_while_another_thread_trains_too() -> None:
    model = replace(MODEL, dropout=0.5)
    alone = train(model, RECIPE)
    with ThreadPoolExecutor(2) as pool:
        together = [pool.submit(retrain, model, RECIPE, alone, Changes()) for _ in range(20)]
    assert all(alike(one.result(), alone) for one in together)


def test_another_recipe_is_trained_as_the_reference_trains_it(reference: ReferenceRun) -> None:
    for other in (replace(RECIPE, max_norm=None), replace(RECIPE, beta2=0.5), replace(RECIPE, optimizer="sgd")):
        assert alike(retrain(MODEL, other, reference, Changes()), train(MODEL, other))
        assert not alike(retrain(MODEL, other, reference, Changes()), reference)


def test_no_optimizer_of_torch_is_built_as_that_imports_its_compiler(
    reference: ReferenceRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.optim, "AdamW", None)
    monkeypatch.setattr(torch.optim, "SGD", None)
    for kind in ("adamw", "sgd"):
        retrain(MODEL, replace(RECIPE, optimizer=kind), reference, Changes())


def test_a_token_that_counts_twice_in_the_gradient_does_not_in_the_loss(reference: ReferenceRun) -> None:
    def twice(step: int, batch: Batch) -> Batch:
        return replace(batch, counts=np.full(batch.labels.shape, 2.0))

    doubled = retrain(MODEL, RECIPE, reference, Changes(batch=twice)).steps[0]
    assert np.isclose(doubled.loss, reference.steps[0].loss, rtol=1e-12)
    assert np.isclose(doubled.grad_norm, 2 * reference.steps[0].grad_norm, rtol=1e-12)


def test_what_the_optimizer_is_given_its_rate_and_what_it_leaves_can_be_otherwise(reference: ReferenceRun) -> None:
    still = Changes(rate=lambda step, fqn: 0.0)
    assert retrain(MODEL, replace(RECIPE, weight_decay=0.0), reference, still).steps[-1].lr == 0.0
    unclipped = Changes(given=lambda step, gradients, norm, parameters: gradients)
    assert alike(retrain(MODEL, RECIPE, reference, unclipped), train(MODEL, replace(RECIPE, max_norm=None)))
    zeroed = Changes(left=lambda step, parameters: {f: 0 * p for f, p in parameters.items()})
    assert not any(p.any() for p in retrain(MODEL, RECIPE, reference, zeroed).steps[0].parameters.values())


def test_a_reference_of_vectors_trains_as_the_one_of_matrices(reference: ReferenceRun) -> None:
    flat = flatten_reference(reference)
    found = retrain(MODEL, RECIPE, flat, Changes(gradients=lambda step, own: own))
    assert alike(found, flat)
    assert {g.shape for g in found.steps[0].gradients.values()} == {g.shape for g in flat.steps[0].gradients.values()}


def test_columns_that_lie_behind_one_another_train_as_those_beside_one_another(reference: ReferenceRun) -> None:
    columns = {"layers.0.attention.wo.weight": 2, "layers.0.feed_forward.w2.weight": 4}
    flat = flatten_reference(reference, columns)
    given = Changes(columns=columns, given=lambda step, own, norm, parameters: own, left=lambda step, after: after)
    unclipped = flatten_reference(train(MODEL, replace(RECIPE, max_norm=None)), columns)
    assert alike(retrain(MODEL, RECIPE, flat, given), unclipped)
    assert alike(retrain(MODEL, RECIPE, flat, Changes(columns=columns)), flat)
    assert not alike(retrain(MODEL, RECIPE, flat, Changes()), flat)


def test_rows_in_another_order_train_as_those_in_the_references(reference: ReferenceRun) -> None:
    rows = {"layers.0.attention.wq.weight": np.random.default_rng(0).permutation(16)}
    ordered = reorder_reference(reference, rows)
    assert alike(retrain(MODEL, RECIPE, ordered, Changes(rows=rows)), ordered)
    assert not alike(retrain(MODEL, RECIPE, ordered, Changes()), ordered)


def test_a_model_that_computes_a_step_in_many_shares_is_altered_once_in_it(reference: ReferenceRun) -> None:
    """A change that doubles logits would double them again with each share, and 16 shares would fill the memory."""

    def half(model: nn.Module, step: int) -> None:
        if step == 1:
            replace_forward(model, lambda before, *args, **named: before(*args, **named) / 2)

    altered = Changes(altered=half)

    def shares(step: int, batch: Batch) -> list[np.ndarray]:
        return [np.repeat(np.eye(len(batch.labels))[:, [row]], batch.labels.shape[1], 1) for row in range(4)]

    def reduce(step: int, gradients: list[dict[str, np.ndarray]]) -> list[dict[str, np.ndarray]]:
        return [{fqn: np.asarray(sum(own[fqn] for own in gradients)) for fqn in gradients[0]}]

    in_four = retrain_separately(MODEL, RECIPE, reference, SeparateCopies((0,) * 4, shares, reduce, (altered,)))[0]
    assert alike(in_four, retrain(MODEL, RECIPE, reference, altered))
    assert not alike(in_four, reference)
