"""An optimizer that steps master copies, from which the trainer writes the model's parameters."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from harness.core.evidence.records import RankEvidence
from harness.core.probe import Probe

STEPS = 3


def trained(*, writes_back: bool, steps: int = STEPS, keeps: tuple[str, ...] = ()) -> tuple[RankEvidence, dict]:
    """Return what the probe saw, and the weights that each step left. keeps: parameters that the optimizer holds itself."""
    torch.manual_seed(0)
    probe = Probe(0, 1)
    probe.install()
    try:
        model = nn.Sequential(nn.Linear(4, 4))
        probe.attach([model])
        masters = {
            name: p if name in keeps else p.detach().clone().requires_grad_() for name, p in model.named_parameters()
        }
        optimizer = torch.optim.AdamW(masters.values(), lr=0.1)
        left = {}
        for step in range(1, steps + 1):
            model(torch.ones(2, 4)).square().sum().backward()
            for name, p in model.named_parameters():
                masters[name].grad = p.grad.clone()
            optimizer.step()
            with torch.no_grad():
                for name, p in model.named_parameters() if writes_back else ():
                    p.copy_(masters[name])
            model.zero_grad()
            left[step] = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
        probe.finish_training()
        return probe.evidence({}), left
    finally:
        probe.remove()


@pytest.mark.parametrize("keeps", [(), ("0.bias",)])
@pytest.mark.parametrize("steps", [1, STEPS])
def test_what_the_next_step_finds_is_the_update(steps: int, keeps: tuple[str, ...]) -> None:
    evidence, left = trained(writes_back=True, steps=steps, keeps=keeps)
    assert [step.step for step in evidence.steps] == list(range(1, steps + 1))
    for step in evidence.steps:
        assert step.gradients.keys() == step.parameters.keys() == {"0.weight", "0.bias"}
        assert all(np.array_equal(step.parameters[name], left[step.step][name]) for name in step.parameters)
        assert step.changed == {}
        assert step.memory["optimizer_state"] == 2 * 20 * 4  # two averages of 16 weights and 4 biases in float32
    assert evidence.steps[-1].optimizer_state.keys() == {"0.weight", "0.bias"}


@pytest.mark.parametrize("keeps", [(), ("0.bias",)])
def test_orphans_are_no_update(keeps: tuple[str, ...]) -> None:
    evidence, _ = trained(writes_back=False, keeps=keeps)
    assert [set(step.parameters) for step in evidence.steps] == [set(keeps)] * STEPS
    assert evidence.steps[-1].optimizer_state.keys() == set(keeps)
