"""Adapters of low rank in the reference: what begins, what is trained, and what they come to."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from literal import ADAMW, TINY

from harness.core.judge.exports import merge_adapters
from harness.reference.config import Lora, TrainingConfig
from harness.reference.counterfactual import Changes, retrain
from harness.reference.model import initial_weights, llama_from
from harness.reference.train import train

WIDE = replace(TINY, vocab_size=32)
MODEL = replace(WIDE, lora=Lora(rank=2, alpha=3.0, targets=("wq", "wo", "w1")))
TRAINING = replace(ADAMW, trainable=("*.lora_?.weight",))


def test_a_model_begins_as_it_is_without_adapters() -> None:
    weights, plain = initial_weights(MODEL, 1), initial_weights(WIDE, 1)
    assert all(np.array_equal(weights[fqn], value) for fqn, value in plain.items())
    assert {fqn for fqn in weights.keys() - plain.keys() if not weights[fqn].any()} == {
        f"layers.0.{name}.lora_b.weight" for name in ("attention.wq", "attention.wo", "feed_forward.w1")
    }


def test_adapters_alone_have_gradients_state_and_updates() -> None:
    run = train(MODEL, TRAINING)
    adapters = {fqn for fqn in run.weights if ".lora_" in fqn}
    last = run.steps[-1]
    assert set(last.gradients) == set(last.optimizer_state) == adapters
    assert {fqn for fqn, value in last.parameters.items() if not np.array_equal(value, run.weights[fqn])} == adapters


def test_merged_weights_are_the_model() -> None:
    after = train(MODEL, TRAINING).steps[-1].parameters
    tokens = torch.arange(8).view(2, 4)
    adapted = llama_from(after, config=MODEL, dtype=torch.float64)(tokens)
    plain = llama_from(merge_adapters(MODEL.lora, after), config=WIDE, dtype=torch.float64)(tokens)
    without = llama_from(merge_adapters(None, after), config=WIDE, dtype=torch.float64)(tokens)
    assert torch.allclose(adapted, plain, rtol=1e-12)
    assert not torch.allclose(adapted, without, rtol=1e-3)


@pytest.mark.parametrize("training", [TRAINING, replace(TRAINING, dtype="float32", compute_dtype="bfloat16")])
def test_training_again_gives_the_same(training: TrainingConfig) -> None:
    run = train(MODEL, training)
    again = retrain(MODEL, training, run, Changes())
    assert [step.loss for step in again.steps] == pytest.approx([step.loss for step in run.steps], rel=1e-6)
    assert set(again.steps[0].gradients) == set(run.steps[0].gradients)
