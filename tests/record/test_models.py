"""Which models of a job are on record, and from when on."""

from __future__ import annotations

import torch
from torch import nn

from harness.probe.clock import Clock
from harness.probe.collectives import CollectiveRecorder
from harness.probe.pipeline import PipelineRecorder
from harness.record.seen import Seen


def seen_at(clock: Clock) -> Seen:
    return Seen(clock, CollectiveRecorder(clock.where), PipelineRecorder(clock), lambda: 0.0)


def train(clock: Clock) -> None:
    clock.enter_forward()
    clock.leave_forward()
    clock.leave_optimizer()


def test_a_model_with_the_names_of_another_and_one_that_comes_after_the_first_step_are_told() -> None:
    clock = Clock()
    seen = seen_at(clock)
    first, same, later = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2))
    assert seen.attach(first) and not seen.attach(same)
    assert seen.left_out == ["Linear, which has a parameter weight as another model has"]
    train(clock)
    assert seen.attach(later) and seen.left_out[1:] == ["Sequential before step 2"]


def test_a_model_that_is_wrapped_anew_after_the_first_step_was_there_before() -> None:
    clock = Clock()
    seen = seen_at(clock)
    model = torch.nn.Linear(2, 2)
    seen.attach(model)
    train(clock)
    again = nn.Module()
    again.module = model
    assert seen.attach(again) and seen.left_out == []
