"""What the probe copies is read when all is over, so that a GPU is never waited for: shown on CPU, whose tensors are taken for
a device's."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from same_records import assert_same
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils._python_dispatch import TorchDispatchMode

from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import StepEvidence
from harness.core.probe import Probe, host_copies, live_tensors, values
from harness.core.probe.structure import as_numpy

LABELS = torch.tensor([[1, 2, -100, 4], [5, -100, 6, 7]])
WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "nonzero", "unique", "masked_select"}
"""Operators of aten whose result the host reads: on a GPU it waits for the device."""


STANDS_BEFORE = (
    "run_and_note_backward",
    "compute_and_note",
    "call_and_note",
    "note_and_act",
    "call_in_context",
    "note_and_push",
    "copy_gradients_and_call",
    "_copy_kernel",
    "_matmul_kernel",
)
"""Functions of the probe through which what the trainer does passes."""


class Waits(TorchDispatchMode):
    """Notes what the probe does that a device would be waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.noted: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        to_host = name == "_to_copy" and "device" in kwargs and not kwargs.get("non_blocking")
        if (name in WAITS or to_host) and by_the_probe():
            self.noted.append(name)
        return func(*args, **kwargs)


def by_the_probe() -> bool:
    """Whoever called last that is not of torch."""
    frame = sys._getframe(2)
    while frame.f_back and (frame.f_globals["__name__"].startswith("torch") or frame.f_code.co_name in STANDS_BEFORE):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__", "")).startswith("harness.core.probe")


def watched(clips: bool, waits: Waits | None = None) -> RankEvidence:
    """Three steps of a model in bfloat16 and float32, whose trainer clips by itself and then alters a weight."""
    torch.manual_seed(0)
    probe = Probe(0, 1)
    probe.install()
    try:
        model = nn.Sequential(nn.Embedding(8, 8), nn.Linear(8, 8), nn.Linear(8, 8).to(torch.bfloat16))
        probe.attach([model])
        with waits or torch.enable_grad():
            train(model, clips)
            probe.finish_training()
        return probe.evidence({1: (0.5, None, None)})
    finally:
        probe.remove()


def train(model: nn.Sequential, clips: bool) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1), foreach=False)
    model[1].register_forward_hook(lambda *found: found[2].to(torch.bfloat16))
    for step in range(3):
        logits = model(torch.full((2, 4), step)).float()
        cross_entropy(logits.flatten(0, 1), LABELS.flatten(), reduction="sum").backward()
        with torch.no_grad():
            for parameter in model.parameters() if clips else ():
                assert parameter.grad is not None
                parameter.grad.mul_(0.5)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            model[1].bias.add_(step)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of the host are taken for a device's."""
    for module in (host_copies, values):
        monkeypatch.setattr(module, "is_on_device", lambda tensor: True)


def of_one_run(evidence: RankEvidence) -> RankEvidence:
    """Without its time, and without what other tests have left in this process."""
    steps = tuple(replace(step, seconds=None, kept=None) for step in evidence.steps)
    return replace(evidence, steps=steps, held=None)


@pytest.mark.parametrize("clips", [True, False])
def test_what_is_read_later_is_what_would_have_been_read_at_once(clips: bool, request: pytest.FixtureRequest) -> None:
    at_once = watched(clips)
    request.getfixturevalue("device")
    later = watched(clips)
    assert_same(of_one_run(at_once), of_one_run(later))
    assert [list(step.changed or ()) for step in later.steps] == [[], ["1.bias"], ["1.bias"]]
    assert [step.scaled for step in later.steps] == [0.5 if clips else 1.0] * 3
    assert [step.lr for step in later.steps] == [pytest.approx(0.1)] * 3
    assert isinstance(later.parameters[0].value, np.ndarray)


@pytest.mark.usefixtures("device")
def test_no_step_waits_for_the_device_because_it_is_watched() -> None:
    waits = Waits()
    watched(True, waits)
    assert waits.noted == []


def test_on_cpu_it_reads_at_once() -> None:
    """So the way of the test above sees what it looks for."""
    waits = Waits()
    watched(True, waits)
    assert set(waits.noted) >= {"equal"}


@pytest.mark.usefixtures("device")
def test_what_the_probe_keeps_to_read_later_is_not_the_trainers() -> None:
    def kept(own: list[torch.Tensor]) -> int:
        held = live_tensors.find_unaccounted_tensors([], [], own, evaluated=False)
        return sum(tensor.shape == (3, 1213) for tensor in held)

    theirs = torch.ones(3, 1213)
    copy = host_copies.copy_to_host(theirs)
    assert (kept([]), kept(host_copies.pending_copies())) == (2, 1)
    del copy
    assert kept([]) == 1


def test_a_step_lasts_from_its_first_forward_pass_to_the_end_of_its_optimizer() -> None:
    steps: tuple[StepEvidence, ...] = watched(False).steps
    assert all(step.seconds is not None and 0 < step.seconds < 60 for step in steps)
    assert [step.allocator for step in steps] == [None] * 3  # the host's memory has no such books


def test_tensors_that_are_copied_together_are_what_each_is_alone():
    wide = torch.randn(5000, 3)
    given = {
        "matrix": torch.randn(700, 700),
        "bfloat16": torch.randn(2).bfloat16(),
        "number": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
        "integers": torch.arange(5),
        "transposed": torch.randn(4, 6).t(),
        "column": wide[:, 1],
        "parameter": nn.Parameter(torch.tensor([-0.0, float("nan")])),
        "more bfloat16": torch.randn(800, 800).bfloat16(),
        "float64": torch.randn(3).double(),
        "large": torch.randn(1000, 1000),
    }
    found = host_copies.copy_all_to_host(given.items())
    given["number"] += 1
    assert found["number"] == 3.0
    given["number"] -= 1
    assert_same(found, {name: as_numpy(tensor) for name, tensor in given.items()})


@pytest.mark.parametrize("count", [1, 2, 7, 8])
def test_one_bit_differs(count):
    ones = torch.ones(count + 1, dtype=torch.float32)
    assert values.has_same_bits(ones[1:], np.ones(count, np.float32))  # begins in the middle of eight bytes
    other = np.ones(count, np.float32)
    other.view(np.int32)[-1] ^= 1
    assert not values.has_same_bits(ones[1:], other)
    assert not values.has_same_bits(torch.zeros(count), -np.zeros(count, np.float32))
    assert values.has_same_bits(torch.full((count,), float("nan")), np.full(count, float("nan"), np.float32))
