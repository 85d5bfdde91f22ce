"""Optimizers that step are known by what they are; a container of them is none."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.optim import optimizer as torch_optimizer

from harness.core.probe.clock import Clock
from harness.core.probe.collectives import CollectiveRecorder
from harness.core.probe.pipeline import PipelineRecorder
from harness.recording.digests import tensor_digest
from harness.recording.optimizers import Optimizers, gradient_bytes
from harness.recording.seen import RankObserver


def sgd() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_an_optimizer_that_has_others_step_for_it_is_none_itself() -> None:
    seen, container, inner = Optimizers(), torch.optim.Adam([nn.Parameter(torch.zeros(1))]), sgd()
    seen.begin_step(container)
    seen.begin_step(inner)
    stepped = {id(each.param_groups[0]["params"][0]) for each in (container, inner)}
    assert (seen.end_step(inner), seen.end_step(container)) == (set(), stepped)
    assert list(seen) == [inner]
    assert seen.parameter_ids() == stepped
    assert [text.partition("(")[0] for text in seen.settings_texts] == ["SGD in Adam"]


class Listed(torch.optim.Optimizer, list[torch.optim.Optimizer]):
    """As that of Modalities under a pipeline. A list has no hash, and equals another of the same members."""

    def __init__(self, *inner: torch.optim.Optimizer) -> None:
        list.__init__(self, inner)
        super().__init__([p for one in inner for group in one.param_groups for p in group["params"]], {})


def test_a_container_that_is_a_list_and_so_has_no_hash_is_none_itself() -> None:
    seen, inner = Optimizers(), sgd()
    for optimizers in ((Listed(inner), inner), (Listed(inner), inner)):
        for each in optimizers:
            seen.begin_step(each)
        for each in reversed(optimizers):
            seen.end_step(each)
    assert [id(each) for each in seen] == [id(inner)]
    assert [text.partition("(")[0] for text in seen.settings_texts] == ["SGD in Listed"]


def test_an_optimizer_that_is_a_list_and_steps_by_itself_is_one() -> None:
    seen, one, other = Optimizers(), Listed(sgd()), Listed(sgd())
    for each in (one, other, one):
        seen.begin_step(each)
        seen.end_step(each)
    assert [id(each) for each in seen] == [id(one), id(other)]


class Broadcasting(torch.optim.Optimizer):
    """As ZeRO: another steps, and then the rank receives what others stepped."""

    def __init__(self, own: nn.Parameter, others: nn.Parameter) -> None:
        super().__init__([own, others], {})
        self.inner, self.others = torch.optim.SGD([own], lr=0.1), others

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.inner.step()
        self.others.fill_(5.0)


def test_contents_are_those_after_the_outermost_step() -> None:
    clock, model = Clock(), nn.Linear(1, 1)
    seen = RankObserver(clock, CollectiveRecorder(clock.step_and_phase), PipelineRecorder(clock), lambda: 0.0)
    assert seen.attach(model)
    optimizer = Broadcasting(model.weight, model.bias)
    model(torch.ones(1)).sum().backward()
    clock.enter_forward()
    clock.leave_forward()
    hooks = [
        torch_optimizer.register_optimizer_step_pre_hook(lambda one, *_: seen.optimizer_begins(one)),
        torch_optimizer.register_optimizer_step_post_hook(lambda one, *_: seen.optimizer_ended(one)),
    ]
    optimizer.step()
    for hook in hooks:
        hook.remove()
    (step,) = [one for one in seen.steps() if one.step == 1]
    assert step.digests == {name: tensor_digest(p).item() for name, p in model.named_parameters()}
    assert seen.optimizers == ("SGD in Broadcasting(momentum 0, weight_decay 0)",)


def test_each_value_that_groups_of_parameters_have_is_told_and_that_a_schedule_changes_it() -> None:
    seen, parts = Optimizers(), [{"params": [nn.Parameter(torch.zeros(1))], "weight_decay": d} for d in (0.1, 0.0)]
    optimizer = torch.optim.AdamW(parts, lr=0.1, betas=(0.95, 0.999))
    for betas in ((0.95, 0.999), (0.9, 0.999), (0.85, 0.999)):
        for group in optimizer.param_groups:
            group["betas"] = betas
        seen.begin_step(optimizer)
        seen.end_step(optimizer)
    assert seen.settings_texts == (
        "AdamW(betas (0.95, 0.999) at first, eps 1e-08, weight_decay 0.1 and 0.0, amsgrad False)",
    )


def test_optimizers_that_step_one_after_the_other_are_two_whatever_raised_before() -> None:
    seen, one, other = Optimizers(), sgd(), sgd()
    seen.begin_step(one)
    seen.pass_begins()
    for optimizer in (one, other):
        seen.begin_step(optimizer)
        assert seen.end_step(optimizer)
    assert {id(each) for each in seen} == {id(one), id(other)}


def test_gradients_of_what_zero_steps_on_in_place_of_the_models_parameters_are_held_too() -> None:
    """As Megatron's distributed optimizer: parameters have none, the rank's parts of them are views into one buffer."""
    parameter, buffer = nn.Parameter(torch.zeros(8)), torch.zeros(8)
    parts = [nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(2))]
    parts[0].grad, parts[1].grad = buffer[:4], buffer[4:6]
    assert gradient_bytes([parameter], torch.optim.SGD(parts, lr=0.1)) == {"gradients": 32}
    parameter.grad = torch.zeros(8)
    assert gradient_bytes([parameter], torch.optim.SGD([parameter], lr=0.1)) == {"gradients": 32}


def test_sparse_gradients_are_counted_by_their_indices_and_values_and_apart_from_dense_ones() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(8, 2, sparse=True), torch.nn.Linear(2, 1, bias=False))
    model(torch.tensor([1, 3, 3])).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    assert gradient_bytes(model.parameters(), optimizer) == {"gradients": 8, "sparse gradients": 3 * 8 + 3 * 2 * 4}


def test_a_gradient_that_an_optimizer_inside_backward_has_used_up_was_there() -> None:
    clock, model = Clock(), nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
    seen = RankObserver(clock, CollectiveRecorder(clock.step_and_phase), PipelineRecorder(clock), lambda: 0.0)
    model[1].weight.requires_grad_(False)
    assert seen.attach(model)
    for parameter in (p for p in model.parameters() if p.requires_grad):
        optimizer = torch.optim.SGD([parameter], lr=0.1)

        def step(_: torch.Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            seen.optimizer_begins(optimizer)
            optimizer.step()
            optimizer.zero_grad()
            seen.optimizer_ended(optimizer)

        parameter.register_post_accumulate_grad_hook(step)
    clock.enter_forward()
    loss = model(torch.ones(1)).sum()
    clock.leave_forward()
    loss.backward()
    assert [step.ungraded for step in seen.steps() if step.step == 1] == [("1.weight",)]


def test_gradients_that_a_closure_brings_inside_the_step_were_found_there() -> None:
    clock, model = Clock(), nn.Linear(1, 1)
    seen = RankObserver(clock, CollectiveRecorder(clock.step_and_phase), PipelineRecorder(clock), lambda: 0.0)
    assert seen.attach(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        seen.optimizer_begins(optimizer)
        clock.enter_optimizer()
        clock.enter_forward()
        model(torch.ones(1)).sum().backward()
        clock.leave_forward()
        clock.leave_optimizer()
        seen.optimizer_ended(optimizer)
        optimizer.zero_grad()
    told = {step.step: step.ungraded for step in seen.steps() if step.step}
    assert told == {1: (), 2: ()}
    assert [step.memory["gradients"] for step in seen.evidence(0, 1).steps] == [8, 8]


def test_settings_that_come_back_from_a_checkpoint_as_lists_are_the_same() -> None:
    seen, optimizer = Optimizers(), torch.optim.AdamW([nn.Parameter(torch.zeros(1))], lr=0.1)
    for betas in ((0.9, 0.999), [0.9, 0.999]):
        optimizer.param_groups[0]["betas"] = betas
        seen.begin_step(optimizer)
        seen.end_step(optimizer)
    assert seen.settings_texts == ("AdamW(betas (0.9, 0.999), eps 1e-08, weight_decay 0.01, amsgrad False)",)
