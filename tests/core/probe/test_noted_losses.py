"""Losses of single tokens that a trainer multiplies by a mask, with and without a note of its adapter."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from harness.core.evidence.step import Microbatch
from harness.core.probe import Probe
from harness.core.probe.losses import note_loss

LABELS = torch.tensor([[1, 2, -100, 3]])
TOKENS = torch.tensor([[1, 2, 3, 4]])


def masked(model: nn.Module, mask: torch.Tensor, *, notes: bool) -> tuple[Microbatch, float]:
    """Return what the probe saw of one microbatch, and its loss. All labels are given to torch's function."""
    probe = Probe(0, 1)
    probe.install()
    try:
        probe.attach([model])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        logits = model(TOKENS)
        each = cross_entropy(logits.flatten(0, 1), LABELS.clamp(min=0).flatten(), reduction="none")
        loss = (each * mask).sum()
        if notes:
            note_loss(LABELS, loss, reduction="sum")
        loss.backward()
        optimizer.step()
        probe.finish_training()
        evidence = probe.evidence({})
    finally:
        probe.remove()
    (part,) = evidence.steps[0].microbatches
    return part, float(loss.detach())


@pytest.mark.parametrize("notes", [True, False])
@pytest.mark.parametrize(
    ("mask", "seen"),
    [
        ([1, 1, 0, 1], [1, 2, -100, 3]),
        ([1, 1, 1, 1], [1, 2, 0, 3]),  # not masked: the label that was clamped is trained on
        ([1, 0, 0, 1], [1, -100, -100, 3]),  # one too many is masked
    ],
)
def test_labels_without_a_gradient_are_masked(notes: bool, mask: list[int], seen: list[int]) -> None:
    torch.manual_seed(0)
    part, loss = masked(nn.Sequential(nn.Embedding(8, 8)), torch.tensor(mask), notes=notes)
    assert part.labels is not None
    expected = LABELS.tolist() if notes else [seen]
    assert part.labels.tolist() == expected
    assert part.valid_tokens == sum(label >= 0 for label in expected[0])
    assert part.loss_sum == pytest.approx(loss, rel=1e-6)
