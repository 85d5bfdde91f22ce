"""A loss that an adapter notes, beside one that a function of torch computes for the same pass."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from harness.probe import Probe
from harness.probe.losses import note_loss

LABELS = torch.tensor([[1, 2, -100, 3]])


@pytest.mark.parametrize(("notes", "valid"), [(True, 3), (False, 4)])
def test_what_the_adapter_notes_counts_alone(notes: bool, valid: int) -> None:
    """The trainer masks torch's loss of each token, for which it gives labels to all of them."""
    torch.manual_seed(0)
    probe = Probe(0, 1)
    probe.install()
    try:
        model = nn.Sequential(nn.Embedding(8, 8))
        probe.attach([model])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        logits = model(torch.tensor([[1, 2, 3, 4]]))
        each = cross_entropy(logits.flatten(0, 1), LABELS.clamp(min=0).flatten(), reduction="none")
        loss = (each * (LABELS.flatten() != -100)).sum()
        if notes:
            note_loss(LABELS, loss, reduction="sum")
        loss.backward()
        optimizer.step()
        probe.trained()
        evidence = probe.evidence({})
    finally:
        probe.remove()
    (part,) = evidence.steps[0].microbatches
    assert part.valid_tokens == valid
    assert part.labels is not None
    assert (part.labels == -100).sum() == 4 - valid
