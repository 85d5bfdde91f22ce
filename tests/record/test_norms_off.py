"""How far torch's own norm of a gradient is off, by which the norm of all may be off."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.probe.clock import Clock
from harness.record.numbers import Numbers


def test_a_norm_of_half_a_million_elements_is_measured() -> None:
    """An output layer's gradient has few large elements and many small ones, and its norm is off the most."""
    model = nn.Linear(256, 2048, bias=False)
    sizes = torch.randn(2048, 256, generator=torch.Generator().manual_seed(3)).mul(2).exp()
    model.weight.grad = sizes
    exact = float(torch.linalg.vector_norm(sizes, dtype=torch.float64))
    clock = Clock()
    numbers = Numbers(clock)
    numbers._note_norms_off([model])
    off = abs(float(torch.linalg.vector_norm(sizes)) / exact - 1)
    assert numbers.norms_off.get(clock.step) == pytest.approx(off)
