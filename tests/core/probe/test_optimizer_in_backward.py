"""Optimizers that step inside backward, one for each parameter: gradients are seen before each, for they are gone behind it."""

from __future__ import annotations

import torch
from torch import nn

from harness.core.probe import Probe


def trained(model: nn.Sequential, optimizers: dict[nn.Parameter, torch.optim.Optimizer]) -> Probe:
    """One step; each parameter's gradient is dropped as soon as it was used."""
    probe = Probe(0, 1)
    probe.install()
    probe.attach([model])

    def step(parameter: nn.Parameter) -> None:
        optimizers[parameter].step()
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    model(torch.ones(1, 3)).square().sum().backward()
    probe.finish_training()
    probe.remove()
    return probe


def test_gradients_of_optimizers_that_step_inside_backward_are_seen_one_after_the_other() -> None:
    model = nn.Sequential(nn.Linear(3, 2, bias=False), nn.Linear(2, 2, bias=False))
    weights = [parameter.detach().clone() for parameter in model.parameters()]
    expected = torch.autograd.grad(model(torch.ones(1, 3)).square().sum(), list(model.parameters()))
    probe = trained(model, {parameter: torch.optim.SGD([parameter], lr=0.5) for parameter in model.parameters()})
    (step,) = probe.evidence({}).steps
    for fqn, gradient, weight in zip(("0.weight", "1.weight"), expected, weights, strict=True):
        assert step.gradients[fqn].tolist() == gradient.tolist()
        assert step.parameters[fqn].tolist() == (weight - 0.5 * gradient).tolist()
    assert step.memory["gradients"] == 24  # of the larger one, for they are never there at once
