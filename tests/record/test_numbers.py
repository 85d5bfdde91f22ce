"""What a rank leaves of numbers: how far torch's own norms are off, and the rows that are samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.probe.clock import Account, Clock
from harness.record.digests import row_digests
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


def test_what_a_later_stage_of_the_same_rank_is_fed_is_no_sample() -> None:
    """Interleaved pipelines have several stages on a rank. The first one gets tokens, and the others what it made of them."""
    clock = Clock()
    clock.account, numbers = Account(1), Numbers(clock)
    tokens = torch.arange(12).reshape(2, 6)
    for inputs in (tokens, torch.rand(2, 6, 4)):
        numbers.pass_begins([], inputs)
    left = numbers.left(0, 2, "", ())
    assert left.passes == {1: (tuple(row_digests(tokens)[0].tolist()),)}
    numbers.fed = numbers.fed[1:]
    assert len(numbers.left(0, 2, "", ()).passes[1][0]) == 2, "without tokens, rows of floats may be samples"
