"""Muon on literal ranks, with a reference that was really trained: matrices are put together from all slices."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import judged, with_step
from trained import RECIPE, Ran, _ran, case_of, reference  # noqa: F401

from harness.core.causes import diagnose
from harness.core.checks import judge
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.reference.train import train

MUON = replace(RECIPE, optimizer="muon")
WQ = "layers.0.attention.wq.weight"


def muon_run(ran: Ran, layout: str, **recipe: object) -> Trial:
    """A run that trained by another recipe than the one requested, if any is given."""
    case = case_of(layout, training=MUON)
    return ran(case, train(case.model, replace(MUON, **recipe)) if recipe else reference(case))


@pytest.mark.parametrize("layout", ["single", "ddp_2", "fsdp_2", "hsdp_2x2", "tp_2", "fsdp_2_tp_2"])
def test_a_right_update_is_right_on_every_layout(ran: Ran, layout: str) -> None:
    trial = muon_run(ran, layout)
    assert {judged(check, trial).verdict for check in ("update", "memory")} == {Verdict.PASS}


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("momentum", {"momentum": 0.9}),
        ("nesterov", {"nesterov": False}),
        ("adjust_lr", {"adjust_lr": "match_rms_adamw"}),
        ("weight decay", {"weight_decay": 0.0}),
    ],
)
def test_another_recipe_is_named_by_its_field(ran: Ran, kind: str, recipe: dict[str, object]) -> None:
    trial = muon_run(ran, "fsdp_2", **recipe)
    found = diagnose(trial, judge(trial))
    assert found is not None and found.kinds == (kind,)
    assert dict(found.causes[0].details) == recipe


def test_an_update_off_by_a_millionth_is_wrong_on_its_rank(ran: Ran) -> None:
    trial = muon_run(ran, "tp_2")
    step = trial.ranks[1].steps[1]
    off = step.parameters | {WQ: step.parameters[WQ] * (1 + 1e-6 * np.eye(*step.parameters[WQ].shape))}
    findings = judged("update", with_step(trial, 1, 2, parameters=off)).findings
    assert [(one.ranks, one.step, one.name) for one in findings] == [((1,), 2, WQ)]


def test_a_matrix_of_which_a_rank_lacks_its_gradient_is_not_compared(ran: Ran) -> None:
    trial = muon_run(ran, "fsdp_2")
    step = trial.ranks[1].steps[2]
    lacking = {fqn: value for fqn, value in step.gradients.items() if fqn != WQ}
    altered = with_step(trial, 1, 3, gradients=lacking)
    assert WQ not in {one.name for one in judged("update", altered).findings}
    assert judged("completed", altered).verdict is Verdict.FAIL
