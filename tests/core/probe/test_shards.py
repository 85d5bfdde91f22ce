"""What a rank holds in vectors of its own, as under ZeRO, is evidence as parameters, gradients and state of modules are."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import nn

from harness.core.probe import Probe
from harness.core.probe.shards import note_shards
from harness.core.probe.values import note_gradients, note_update

PART = slice(1, 5)
"""Of a weight's six entries, those that this rank steps on."""


class OnAVector:
    """ZeRO-1 of one rank of two: the optimizer steps on a copy of a part."""

    def __init__(self, model: nn.Linear) -> None:
        self.model, self.vector = model, model.weight.detach().reshape(-1)[PART].clone()
        self.optimizer = torch.optim.AdamW([self.vector], lr=0.5)

    def parameters(self) -> list[tuple[str, torch.Tensor]]:
        return [("weight", self.model.weight.detach())]

    def gradients(self) -> list[tuple[str, torch.Tensor]]:
        return [] if self.vector.grad is None else [("weight", self.vector.grad)]

    def state(self) -> list[tuple[str, dict[str, torch.Tensor]]]:
        return [("weight", dict(self.optimizer.state.get(self.vector, {})))]

    def step(self) -> None:
        self.backward()
        self.update()
        self.gather(7.0)
        note_update()

    def backward(self) -> None:
        self.model(torch.ones(1, 3)).sum().backward()
        self.vector.grad = self.model.weight.grad.reshape(-1)[PART].clone()
        self.model.weight.grad = None

    def update(self) -> None:
        note_gradients()
        self.vector.grad *= 0.5  # clipped
        self.optimizer.step()
        self.vector.grad = None
        with torch.no_grad():
            self.model.weight.view(-1)[PART] = self.vector

    def gather(self, made: float) -> None:
        """What another rank made of the rest."""
        with torch.no_grad():
            self.model.weight.view(-1)[5:] = made


@pytest.fixture
def trained() -> Iterator[tuple[Probe, OnAVector]]:
    probe, model = Probe(0, 1), nn.Linear(3, 2, bias=False)
    probe.install()
    zero = OnAVector(model)
    note_shards(model, zero)
    probe.attach([model])
    zero.step()
    zero.step()
    probe.finish_training()
    yield probe, zero
    probe.remove()


def test_gradients_are_the_part_before_clipping_and_parameters_are_whole_after_all_ranks_stepped(trained) -> None:
    probe, _ = trained
    evidence = probe.evidence({})
    assert [step.step for step in evidence.steps] == [1, 2]
    first = evidence.steps[0]
    assert first.gradients["weight"].tolist() == [1.0] * 4
    assert first.parameters["weight"].shape == (2, 3) and first.parameters["weight"][1, 2] == 7.0
    assert first.changed == {} and first.lr == 0.5


def test_state_is_that_of_the_vector_and_memory_that_of_what_is_behind_all(trained) -> None:
    probe, zero = trained
    last = probe.evidence({}).steps[-1]
    np.testing.assert_array_equal(
        last.optimizer_state["weight"]["exp_avg"], zero.optimizer.state[zero.vector]["exp_avg"]
    )
    assert last.memory == {"parameters": 24, "gradients": 16, "optimizer_state": 32}


def test_parameters_that_change_behind_the_update_are_seen(trained) -> None:
    probe, zero = trained
    with torch.no_grad():
        zero.model.weight[0, 0] = 9.0
    zero.step()
    assert list(probe.evidence({}).steps[1].changed) == ["weight"]


def test_an_update_that_is_gathered_in_the_next_forward_pass_is_of_the_step_that_made_it() -> None:
    """Neither is it a change behind that step, nor what it meets of the step before."""
    probe, model = Probe(0, 1), nn.Linear(3, 2, bias=False)
    probe.install()
    zero = OnAVector(model)
    note_shards(model, zero)
    probe.attach([model])
    for step in (1, 2, 3):
        zero.backward()
        if step > 1:
            zero.gather(float(step - 1))
            note_update(step - 1)
        zero.update()
    zero.gather(3.0)
    note_update()
    probe.finish_training()
    steps = probe.evidence({}).steps
    probe.remove()
    assert [(step.step, step.parameters["weight"][1, 2], step.changed) for step in steps] == [
        (1, 1.0, {}),
        (2, 2.0, {}),
        (3, 3.0, {}),
    ]
    own = [step.parameters["weight"][0, 1] for step in steps]
    assert own == sorted(own, reverse=True) and len({*own}) == 3


def test_a_parameter_that_is_cut_is_evidence_as_it_is_held() -> None:
    model = nn.Linear(3, 2, bias=False)
    zero = OnAVector(model)
    zero.parameters = lambda: [("weight", zero.vector)]
    note_shards(model, zero)
    probe = Probe(0, 1)
    probe.attach([model])
    (tensor,) = probe.evidence({}).parameters
    assert (tensor.global_shape, tensor.value.shape) == ((4,), (4,))
    probe.remove()
