"""What is called around an optimizer's step, and what the clock says meanwhile; which tensors an optimizer keeps."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from harness.core.probe.clock import Clock
from harness.core.probe.optimizer_steps import OptimizerSteps, state_tensors, stepped_tensors


class Noting(torch.optim.SGD):
    def __init__(self, clock: Clock) -> None:
        super().__init__([nn.Parameter(torch.zeros(1))], lr=0.1)
        self.clock = clock
        self.phases: list[str] = []

    def step(self, closure: Any = None) -> None:
        self.phases.append(self.clock.phase())


def test_observers_are_called_in_order_before_the_clock_enters_a_step_and_after_it_left() -> None:
    clock = Clock()
    optimizer = Noting(clock)
    seen: list[tuple[str, str]] = []
    steps = OptimizerSteps(
        clock,
        before=[lambda _: seen.append(("first", clock.phase())), lambda _: seen.append(("second", clock.phase()))],
        after=[lambda each: seen.append(("after", clock.phase() + " same" * (each is optimizer)))],
    )
    steps.install()
    optimizer.step()
    steps.remove()
    optimizer.step()
    assert seen == [("first", "other"), ("second", "other"), ("after", "other same")]
    assert optimizer.phases == ["optimizer", "other"]


def test_tensors_of_an_optimizer_are_those_of_all_its_groups_and_states_without_numbers() -> None:
    parameters = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(3))]
    optimizer = torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)
    assert [id(tensor) for tensor in stepped_tensors(optimizer)] == [id(parameter) for parameter in parameters]
    average, block = torch.zeros(2), torch.zeros(4)
    states = [{"step": torch.tensor(3.0), "exp_avg": average, "count": 3}, {0: {"block": block}}]
    assert [id(tensor) for tensor in state_tensors(states)] == [id(average), id(block)]
