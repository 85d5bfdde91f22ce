"""What holds for every diagnosis: one line, its evidence, no cause without a failing check, and no rule that costs a verdict.

Literal evidence, no ranks. Whole texts are asserted; after a deliberate change of wording,
`EXPECTTEST_ACCEPT=1 pytest tests/diagnosis` rewrites them, and git shows the difference.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from diagnosed import NORM, dims, first_line, fsdp_4
from literal import (
    UNEVEN,
    cause_of,
    tiny_case,
    trial_of,
    with_every_rank,
    with_rank,
    with_step,
    with_value,
)

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes import all_facts, all_suspects, diagnose
from harness.core.checks import judge
from harness.core.judge.result import Result, Verdict
from harness.core.judge.trial import Trial
from harness.core.report.cause_text import diagnosis_line, evidence_rows


def test_a_correct_run_has_no_diagnosis() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    assert diagnose(trial, judge(trial)) is None


# ---- a diagnosis never costs the verdict


def explode(trial, broken):
    raise KeyError("layers.7")


def test_a_suspect_that_raises_is_skipped_and_said_so() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_value(trial, 0, 1, "gradients", NORM, lambda g: g**2)
    whole, found = diagnose(trial, judge(trial)), diagnose(trial, judge(trial), (explode, *all_suspects()), all_facts())
    assert whole is not None and found is not None
    assert diagnosis_line(found) == diagnosis_line(whole)
    more = [line for line in found.evidence if line not in whole.evidence]
    assert more[-1][0] == "not tried"
    assert more[-1][1].startswith("explode raised KeyError: 'layers.7' at explode:")


def test_where_everything_raises_the_first_failing_check_is_told() -> None:
    trial = with_step(fsdp_4(), 1, 3, memory={"parameters": 1888, "optimizer_state": 944})
    found = diagnose(trial, judge(trial), (explode,), (explode,))
    assert found is not None
    assert diagnosis_line(found) == "memory: rank 1, step 3, parameters: expected 472 B, observed 1.888 kB (1888)"


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=4)
@pytest.mark.parametrize("layout", ["hsdp_2x2", "fsdp_2_tp_2", dims(shard=8)], ids=str)
@pytest.mark.parametrize(
    "mess", ["no gradients", "NaN", "one number", "no collectives", "no microbatches", "other numbers"]
)
def test_nothing_raises_on_evidence_that_makes_little_sense(layout, mess) -> None:
    trial = with_every_rank(trial_of(tiny_case(layout, model=UNEVEN)), lambda t, rank: spoiled(t, rank, mess))
    found = diagnose(trial, judge(trial))
    assert found is None or "not tried" not in dict(evidence_rows(found.evidence)), found


def spoiled(trial: Trial, rank: int, mess: str) -> Trial:
    if mess == "no collectives":
        return with_rank(trial, rank, collectives=())
    for step in trial.ranks[rank].steps:
        changes = {
            "no gradients": {"gradients": {}},
            "NaN": {"gradients": {f: g * np.nan for f, g in step.gradients.items()}, "grad_norm": math.nan},
            "one number": {"gradients": {f: np.ones(()) for f in step.gradients}},
            "no microbatches": {"microbatches": ()},
            "other numbers": {"gradients": {f: g + 1 for f, g in step.gradients.items()}},
        }[mess]
        trial = with_step(trial, rank, step.step, **changes)
    return trial


# ---- what goes with the first line


def test_a_check_that_is_broken_without_saying_where_is_told() -> None:
    assert cause_of(diagnose(fsdp_4(), [Result("loss", Verdict.FAIL, 1)])) == "loss is broken and does not say where"


def test_suspects_of_the_caller_are_those_of_earlier_launches_too() -> None:
    trial = trial_of(tiny_case("ddp_2", resume=(Saved(1, ParallelDims()),)))
    before = with_value(trial.saved[0], 0, 1, "gradients", NORM, lambda g: 2 * g)
    trial = replace(trial, saved=(before,))
    assert first_line(trial).startswith("saved_1: gradients are wrong ")
    assert cause_of(diagnose(trial, judge(trial), (), ())).startswith("saved_1: gradients are ")
