"""Muon's rule: what torch.optim.Muon does once it casts nothing to bfloat16, and why a matrix must be whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from literal import ADAMW

from harness.reference import muon
from harness.reference.config import TrainingConfig, rule_of, unused_fields
from harness.reference.optimizer import Optimizer, options_of

MUON = replace(ADAMW, optimizer="muon", lr=0.05)
SHAPES = [(8, 8), (4, 8), (12, 8)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("nesterov", "adjust_lr"), [(True, "original"), (False, "match_rms_adamw")])
def test_two_steps_are_those_of_torch_but_for_its_cast(
    shape: tuple[int, int], nesterov: bool, adjust_lr: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)
    training = replace(MUON, nesterov=nesterov, adjust_lr=adjust_lr)
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.randn(shape, dtype=torch.float64))
    theirs, average = model.weight.detach().clone(), torch.zeros(shape, dtype=torch.float64)
    own, rest = Optimizer(model), {"has_complex": False, "ns_steps": muon.STEPS, "eps": muon.SMALLEST_LENGTH}
    for _ in range(2):
        model.weight.grad = torch.randn(shape, dtype=torch.float64)
        own.step({"weight": options_of(training, "layers.0.weight", lr=training.lr)})
        torch.optim._muon._single_tensor_muon(
            [theirs],
            [model.weight.grad],
            [average],
            lr=training.lr,
            weight_decay=training.weight_decay,
            momentum=training.momentum,
            nesterov=nesterov,
            ns_coefficients=muon.COEFFICIENTS,
            adjust_lr_fn=adjust_lr,
            **rest,
        )
    assert torch.allclose(model.weight, theirs, rtol=0, atol=1e-13)
    assert torch.equal(own.state["weight"]["momentum_buffer"], average)


@pytest.mark.parametrize("shape", SHAPES)
def test_singular_values_come_near_1_and_singular_vectors_stay(shape: tuple[int, int]) -> None:
    matrix = np.random.default_rng(3).standard_normal(shape)
    (u, _, v), turned = np.linalg.svd(matrix, full_matrices=False), muon.newton_schulz(matrix)
    values = np.diag(u.T @ turned @ v.T)
    assert np.allclose(u @ np.diag(values) @ v, turned, atol=1e-12)
    assert ((values > 0.3) & (values < 1.3)).all()


def test_slices_that_are_turned_apart_are_no_slices_of_the_turned_matrix() -> None:
    matrix = np.random.default_rng(3).standard_normal((8, 8))
    apart = np.concatenate([muon.newton_schulz(half) for half in np.split(matrix, 2)])
    assert np.linalg.norm(apart - muon.newton_schulz(matrix)) > 0.1 * np.linalg.norm(apart)
    assert not muon.newton_schulz(np.zeros((8, 8))).any()


@pytest.mark.parametrize(
    ("training", "fqn", "rule"),
    [
        (MUON, "layers.0.attention.wq.weight", "muon"),
        (MUON, "module.layers.0.feed_forward.w1.weight", "muon"),
        (MUON, "layers.0.ffn_norm.weight", "adamw"),
        (MUON, "tok_embeddings.weight", "adamw"),
        (replace(MUON, muon_matrices="all"), "output.weight", "muon"),
        (replace(MUON, muon_matrices="all"), "norm.weight", "adamw"),
        (ADAMW, "layers.0.attention.wq.weight", "adamw"),
    ],
)
def test_matrices_of_blocks_are_muons_and_all_else_is_adamws(training: TrainingConfig, fqn: str, rule: str) -> None:
    assert rule_of(training, fqn) == rule


def test_what_options_an_optimizer_leaves_alone() -> None:
    assert unused_fields(MUON) == set()
    assert unused_fields(ADAMW) == {"momentum", "nesterov", "adjust_lr", "muon_matrices"}
    assert unused_fields(replace(ADAMW, optimizer="sgd")) == unused_fields(ADAMW) | {"beta1", "beta2", "eps"}
