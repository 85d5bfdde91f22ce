"""Steps of a repeat in which nothing is reordered are trained as they are: it would take several times as long for nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from literal import TINY

from harness.reference import train
from harness.reference.config import TrainingConfig
from harness.reference.noise import noise_orders_of_kind, reorders_step
from harness.reference.precision import DTYPES

FLOAT32 = TrainingConfig(steps=2, global_batch=4, seq_len=8, dtype="float32")
BFLOAT16 = replace(FLOAT32, compute_dtype="bfloat16")


@pytest.mark.parametrize("training", [FLOAT32, BFLOAT16], ids=["float32", "bfloat16"])
def test_shares_of_a_batch_have_the_same_noise_with_and_without(
    training: TrainingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(TINY, vocab_size=16)

    def noise() -> Any:
        return train.train(model, training, noise=("float32 shares",)).noise["float32 shares"]

    without = noise()
    monkeypatch.setattr(train, "reorders_step", lambda *_: True)
    assert noise() == without
    assert without.gradient[-1] > 0


@pytest.mark.parametrize(
    ("kind", "step", "quantize", "expected"),
    [
        ("parts", 1, None, True),
        ("shares", 1, "float8_rowwise", False),
        ("shares", 2, "float8_rowwise", True),
        ("shares", 2, None, False),
    ],
)
def test_which_steps_are_reordered(kind: str, step: int, quantize: Any, expected: bool) -> None:
    (order, *_) = noise_orders_of_kind(kind, FLOAT32, DTYPES["float32"])
    assert reorders_step(order, step, replace(FLOAT32, quantize=quantize)) is expected
