"""Which models of a job are on record, and from when on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from harness.core.probe.clock import Clock
from harness.core.probe.collectives import CollectiveRecorder
from harness.core.probe.pipeline import PipelineRecorder
from harness.recording.digests import tensor_digest
from harness.recording.seen import RankObserver


def seen_at(clock: Clock) -> RankObserver:
    return RankObserver(clock, CollectiveRecorder(clock.step_and_phase), PipelineRecorder(clock), lambda: 0.0)


def train(clock: Clock) -> None:
    clock.enter_forward()
    clock.leave_forward()
    clock.leave_optimizer()


def train_with(seen: RankObserver, clock: Clock, optimizer: torch.optim.Optimizer) -> None:
    clock.enter_forward()
    clock.leave_forward()
    seen.optimizer_begins(optimizer)
    clock.enter_optimizer()
    optimizer.step()
    clock.leave_optimizer()
    seen.optimizer_ended(optimizer)


def names(seen: RankObserver) -> list[str]:
    return [tensor.fqn for tensor in seen.evidence(0, 1).parameters]


def test_a_model_with_the_names_of_another_has_names_of_its_own_and_one_that_comes_after_the_first_step_is_told() -> (
    None
):
    clock = Clock()
    seen = seen_at(clock)
    first, same, wrapped = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    assert all(map(seen.attach, (first, same, nn.Linear(2, 2, bias=False), wrapped)))
    assert names(seen) == ["weight", "bias", "model2.weight", "model2.bias", "model3.weight", "0.weight", "0.bias"]
    assert not seen.left_out
    train(clock)
    later = nn.Sequential(nn.Linear(2, 2))
    assert seen.attach(later) and seen.left_out == ["Sequential before step 2"]
    assert names(seen)[-2:] == ["model2.0.weight", "model2.0.bias"]


@pytest.mark.parametrize("steps_on", ["the first", "both", "another tensor", "the first, unseen"])
def test_a_model_that_comes_late_is_told_unless_only_known_models_were_trained_before(steps_on: str) -> None:
    clock = Clock()
    seen = seen_at(clock)
    first, later = nn.Linear(2, 2), nn.Linear(2, 2)
    assert seen.attach(first)
    began = tensor_digest(first.weight).item()
    stepped = {"both": [first.weight, later.weight], "another tensor": [nn.Parameter(torch.ones(2))]}
    optimizer = torch.optim.SGD(stepped.get(steps_on, [first.weight]), lr=0.1)
    optimizer.param_groups[0]["params"][0].grad = torch.ones_like(optimizer.param_groups[0]["params"][0])
    train(clock) if steps_on.endswith("unseen") else train_with(seen, clock, optimizer)
    assert seen.attach(later) and seen.left_out == ([] if steps_on == "the first" else ["Linear before step 2"])
    assert seen.steps()[0].digests["weight"] == began


def test_a_wrapper_of_a_model_that_was_called_alone_takes_its_place_among_names() -> None:
    seen = seen_at(Clock())
    first, inner = nn.Linear(2, 2), nn.Linear(2, 2)
    outer = nn.Sequential()
    outer.module = inner  # as DDP has it
    assert seen.attach(first) and seen.attach(inner) and seen.attach(outer)
    assert names(seen) == ["weight", "bias", "model2.weight", "model2.bias"]


def step_on_a_copy(seen: RankObserver, clock: Clock, model: nn.Linear, *, gathers: bool) -> None:
    """As ZeRO by hand; the optimizer has no parameter of the model."""
    clock.enter_forward()
    seen.pass_begins(model, (torch.ones(1, 2),), {})
    seen.pass_ends(model)
    clock.leave_forward()
    flat = nn.Parameter(model.weight.detach().clone())
    flat.grad = torch.ones_like(flat)
    optimizer = torch.optim.SGD([flat], lr=0.1)
    seen.optimizer_begins(optimizer)
    clock.enter_optimizer()
    optimizer.step()
    clock.leave_optimizer()
    seen.optimizer_ended(optimizer)
    if gathers:
        model.weight.data.copy_(flat.detach())


def test_what_an_optimizer_of_other_tensors_made_of_parameters_is_read_in_the_next_step() -> None:
    clock, model = Clock(), nn.Linear(2, 2, bias=False)
    seen = seen_at(clock)
    seen.attach(model)
    for gathers in (True, False, True):
        step_on_a_copy(seen, clock, model, gathers=gathers)
    digests = {step.step: step.digests for step in seen.steps()}
    assert [sorted(digests[step]) for step in (0, 1, 2, 3)] == [["weight"], ["weight"], ["weight"], []]
    assert digests[0] != digests[1] == digests[2]
    assert seen.stepped == ()


def test_a_model_that_is_wrapped_anew_after_the_first_step_was_there_before() -> None:
    clock = Clock()
    seen = seen_at(clock)
    model = torch.nn.Linear(2, 2)
    seen.attach(model)
    train(clock)
    again = nn.Module()
    again.module = model
    assert seen.attach(again) and seen.left_out == []


def test_a_loss_that_holds_the_output_layer_of_a_model_has_no_parameters_of_its_own() -> None:
    clock = Clock()
    seen = seen_at(clock)
    model, loss = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Module()
    loss.output = model[1]
    assert seen.attach(model) and seen.attach(loss)
    assert seen.parts == [model] and seen.classes == ("Sequential",) and seen.left_out == []
    for module, given in ((model, torch.ones(1, 2, dtype=torch.int64)), (loss, torch.ones(1, 2))):
        clock.enter_forward()
        seen.pass_begins(module, (given,), {})
        clock.leave_forward()
    clock.leave_optimizer()
    assert [fed.dtype for step in seen.steps() for fed in step.fed] == ["int64"]


class OfBlocks(torch.optim.Optimizer):
    """Keeps its state as Shampoo does, in maps of maps."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["block_0"] = {"factors": (torch.ones(2, 2), torch.ones(3, 3)), "step": torch.ones(())}


def test_state_in_maps_of_maps_is_state() -> None:
    clock, model = Clock(), nn.Linear(2, 2, bias=False)
    seen, optimizer = seen_at(clock), OfBlocks(model.parameters())
    seen.attach(model)
    train_with(seen, clock, optimizer)
    (step,) = seen.evidence(0, 1).steps
    assert step.memory["optimizer_state"] == (4 + 9) * 4


def test_a_model_that_is_called_with_a_batch_of_names_was_fed_its_tokens() -> None:
    clock, model, tokens = Clock(), nn.Linear(4, 4), torch.arange(4).reshape(1, 4)
    seen = RankObserver(clock, CollectiveRecorder(clock.step_and_phase), PipelineRecorder(clock), lambda: 0.0)
    assert seen.attach(model)
    clock.enter_forward()
    seen.pass_begins(model, ({"attention_mask": tokens > 0, "input_ids": tokens},), {})
    clock.leave_forward()
    clock.leave_optimizer()
    assert [(fed.dtype, fed.shape) for step in seen.steps() for fed in step.fed] == [("int64", (1, 4))]
    assert [len(fed.others) for step in seen.steps() for fed in step.fed] == [0]
