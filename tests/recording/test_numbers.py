"""What a rank leaves of numbers: how far torch's own norms are off, and the rows that are samples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

from harness.core.probe.clock import Account, Clock
from harness.recording.digests import row_digests
from harness.recording.numbers import NumbersRecorder, watch_scalers


def test_a_norm_of_half_a_million_elements_is_measured() -> None:
    """An output layer's gradient has few large elements and many small ones, and its norm is off the most."""
    model = nn.Linear(256, 2048, bias=False)
    sizes = torch.randn(2048, 256, generator=torch.Generator().manual_seed(3)).mul(2).exp()
    model.weight.grad = sizes
    exact = float(torch.linalg.vector_norm(sizes, dtype=torch.float64))
    clock = Clock()
    numbers = NumbersRecorder(clock)
    numbers.note_norms_off([model])
    off = abs(float(torch.linalg.vector_norm(sizes)) / exact - 1)
    assert numbers.norms_off.get(clock.step) == pytest.approx(off)


def test_what_a_later_stage_of_the_same_rank_is_fed_is_no_sample() -> None:
    """Interleaved pipelines have several stages on a rank. The first one gets tokens, and the others what it made of them."""
    clock = Clock()
    clock.account, numbers = Account(1), NumbersRecorder(clock)
    tokens = torch.arange(12).reshape(2, 6)
    for inputs in (tokens, torch.rand(2, 6, 4)):
        numbers.pass_begins([], inputs)
    left = numbers.build_sketches(0, 2, "", ())
    assert left.passes == {1: (tuple(row_digests(tokens)[0].tolist()),)}
    numbers.pass_inputs = numbers.pass_inputs[1:]
    assert len(numbers.build_sketches(0, 2, "", ()).passes[1][0]) == 2, "without tokens, rows of floats may be samples"


def test_passes_of_a_step_that_a_loss_scaler_leaves_out_are_fed_nothing() -> None:
    clock, model = Clock(), nn.Linear(2, 1)
    numbers, scaler = NumbersRecorder(clock), torch.amp.GradScaler("cpu", init_scale=2.0)
    optimizer, rows = torch.optim.SGD(model.parameters()), [torch.full((1, 2), value) for value in (torch.inf, 1.0)]
    optimizer.register_step_pre_hook(lambda *_: clock.enter_optimizer())
    optimizer.register_step_post_hook(lambda *_: clock.leave_optimizer())
    kept = torch.amp.GradScaler.step, torch.amp.GradScaler.update, ShardedGradScaler.update
    try:
        watch_scalers(clock, numbers.note_scale)
        for row in rows:
            clock.enter_forward()
            numbers.pass_begins([], row)
            loss = model(row).sum()
            clock.leave_forward()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.amp.GradScaler.step, torch.amp.GradScaler.update, ShardedGradScaler.update = kept
    left = numbers.build_sketches(0, 1, "", ())
    assert left.passes == {1: (tuple(row_digests(rows[1])[0].tolist()),)}
    assert left.scales == {1: 1.0}
