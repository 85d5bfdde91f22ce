"""Optimizers that step are known by what they are; a container of them is none."""

from __future__ import annotations

import torch
from torch import nn

from harness.record.optimizers import Optimizers


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_an_optimizer_that_has_others_step_for_it_is_none_itself() -> None:
    seen, container, inner = Optimizers(), torch.optim.Adam([nn.Parameter(torch.zeros(1))]), sgd()
    seen.begins(container)
    seen.begins(inner)
    assert (seen.ended(inner), seen.ended(container)) == (True, False)
    assert list(seen) == [inner]
    assert seen.texts == ("SGD(momentum 0, weight_decay 0)",)


def test_optimizers_that_step_one_after_the_other_are_two_whatever_raised_before() -> None:
    seen, one, other = Optimizers(), sgd(), sgd()
    seen.begins(one)
    seen.pass_begins()
    for optimizer in (one, other):
        seen.begins(optimizer)
        assert seen.ended(optimizer)
    assert {id(each) for each in seen} == {id(one), id(other)}
