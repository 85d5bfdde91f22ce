"""Other norms than the global one: what they are of, and in which precision. Literal evidence, no ranks."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from diagnosed import dims
from literal import tiny_case, trial_of, with_step

from harness.diagnosis.norms import other_norms
from harness.judge.trial import Trial
from harness.spec.dims import ParallelDims


def with_gradients_in(dtype: Any, trial: Trial) -> Trial:
    """Of numbers that float32 holds and whose squares it does not."""
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            seen = {fqn: gradient.astype(np.float32).astype(dtype) for fqn, gradient in step.gradients.items()}
            trial = with_step(trial, rank, step.step, gradients=seen)
    return trial


@pytest.mark.parametrize("layout", [dims(2, 2), dims(shard=2, tp=2)])
def test_norms_of_gradients_in_float32_are_summed_in_float64(layout: ParallelDims) -> None:
    trial = trial_of(tiny_case(layout))
    narrow, wide = (other_norms(with_gradients_in(dtype, trial)) for dtype in (np.float32, np.float64))
    for (text, one), (_, other) in zip(narrow, wide, strict=True):
        for rank in trial.ranks:
            assert math.isclose(one(rank, 1), other(rank, 1), rel_tol=1e-12), text
