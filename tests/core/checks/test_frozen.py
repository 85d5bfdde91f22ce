"""Checks of a recipe that trains some parameters only. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import findings
from literal import ADAMW, judged, tiny_case, trial_of, with_step, with_value

from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial

W2, OUTPUT, WQ = "layers.0.feed_forward.w2.weight", "output.weight", "layers.0.attention.wq.weight"
SOME = replace(ADAMW, trainable=(W2, OUTPUT))
CHECKS = ("completed", "features", "memory", "traffic", "gradients", "grad_norm", "replica_agreement", "update")


def frozen_trial(layout: str = "fsdp_2") -> Trial:
    return trial_of(tiny_case(layout, SOME))


@pytest.mark.parametrize("layout", ["ddp_2", "fsdp_2", "tp_2"])
def test_a_correct_run_passes(layout: str) -> None:
    trial = frozen_trial(layout)
    verdicts = {check: judged(check, trial).verdict for check in CHECKS}
    assert {check for check, verdict in verdicts.items() if verdict is Verdict.FAIL} == set()
    assert judged("gradients", trial).examined == 2 * 3 * 2


def test_a_gradient_of_a_frozen_parameter_is_found() -> None:
    trial = frozen_trial()
    record = trial.ranks[1].steps[1]
    seen = with_step(trial, 1, 2, gradients=record.gradients | {WQ: record.parameters[WQ] * 0.1})
    assert [(one.ranks, one.step, one.name) for one in findings("completed", seen)] == [((1,), 2, WQ)]
    assert judged("gradients", seen).verdict is Verdict.PASS


@pytest.mark.parametrize("by", [1e-16, 0.1])
def test_a_frozen_parameter_that_moves_is_found_whatever_by(by: float) -> None:
    moved = with_value(frozen_trial(), 0, 1, "parameters", WQ, lambda value: value * (1 + 2 * by))
    found = findings("update", moved)
    assert {(one.ranks, one.step, one.name) for one in found} == {((0,), 1, WQ)}


def test_state_of_a_frozen_parameter_is_found() -> None:
    trial = frozen_trial()
    last = trial.ranks[0].steps[-1]
    state = last.optimizer_state | {WQ: {"exp_avg": np.zeros_like(last.parameters[WQ])}}
    found = findings("update", with_step(trial, 0, 3, optimizer_state=state))
    assert [(one.ranks, one.name, one.quantity) for one in found] == [((0,), WQ, "exp_avg")]
    held = last.memory | {"optimizer_state": last.memory["optimizer_state"] + 8}
    assert [one.quantity for one in findings("memory", with_step(trial, 0, 3, memory=held))] == ["optimizer_state"]
