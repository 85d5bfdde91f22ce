"""A step that an optimizer makes by a closure: forward, backward and clipping run inside of its `step`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from harness.core.evidence.records import RankEvidence
from harness.core.probe import Probe

RATES = [0.1, 0.2, 0.3]


def trained(*, clips: bool, by_closure: bool) -> RankEvidence:
    """Return what the probe saw of three steps, each of which has another rate."""
    torch.manual_seed(0)
    probe = Probe(0, 1)
    probe.install()
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        probe.attach([model])
        optimizer = torch.optim.SGD(model.parameters())

        def train() -> torch.Tensor:
            optimizer.zero_grad()
            loss = model(torch.ones(2, 4)).square().sum()
            loss.backward()
            if clips:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            return loss

        for rate in RATES:
            optimizer.param_groups[0]["lr"] = rate
            if by_closure:
                optimizer.step(train)
            else:
                train()
                optimizer.step()
        probe.finish_training()
        return probe.evidence({})
    finally:
        probe.remove()


@pytest.mark.parametrize("clips", [True, False])
def test_rates_and_gradients_are_those_of_the_step_that_the_closure_trains(clips: bool) -> None:
    usual = trained(clips=clips, by_closure=False)
    closed = trained(clips=clips, by_closure=True)
    assert [step.step for step in closed.steps] == [1, 2, 3]
    assert [step.lr for step in closed.steps] == RATES
    for one, other in zip(usual.steps, closed.steps, strict=True):
        assert one.gradients.keys() == other.gradients.keys() == {"0.weight", "0.bias"}
        assert all((one.gradients[name] == other.gradients[name]).all() for name in one.gradients)
        assert all((one.parameters[name] == other.parameters[name]).all() for name in one.parameters)
