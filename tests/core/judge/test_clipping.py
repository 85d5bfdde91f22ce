"""Gradients as clipping is given them: what was seen at the end of backward, and what the optimizer was given."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from literal import SGD, judged, tiny_case, trial_of, with_step

from harness.core.evidence.step import StepEvidence
from harness.core.judge.clipping import steps_right_after_scaling, with_gradients_after
from harness.core.judge.result import Verdict
from harness.core.judge.tolerance import clip_coefficient
from harness.core.judge.trial import Trial
from harness.core.probe.backward import common_factor

EXACT = {"w": 2.0**-52, "b": 2.0**-52}
GRADIENTS = {"w": np.array([[3.0, -4.0], [0.0, 1e-9]]), "b": np.array([0.1])}


def times(factor: float) -> dict[str, np.ndarray]:
    return {fqn: gradient * factor for fqn, gradient in GRADIENTS.items()}


def test_one_number_that_all_gradients_were_multiplied_by_is_found() -> None:
    assert common_factor(GRADIENTS, GRADIENTS, EXACT) == 1.0
    assert common_factor(GRADIENTS, times(1 / 3), EXACT) == pytest.approx(1 / 3, rel=1e-15)
    assert math.isnan(common_factor(GRADIENTS, times(1 / 3) | {"b": GRADIENTS["b"]}, EXACT))
    assert math.isnan(common_factor(GRADIENTS, {"w": GRADIENTS["w"] / 3}, EXACT))
    assert math.isnan(common_factor({"w": np.zeros(2)}, {"w": np.ones(2)}, EXACT))


CASE = tiny_case("fsdp_2", replace(SGD, max_norm=0.5))


def coefficient(trial: Trial, number: int) -> float:
    return clip_coefficient(trial.reference_step(number).grad_norm, trial.case.training.max_norm)


def seen(scale: float, *, clipped: bool = False, by: float = 1.0) -> Trial:
    """As it is stored once all ranks have ended."""
    trial = as_left(scale, clipped=clipped, by=by)
    return replace(trial, run=with_gradients_after(trial.run, steps_right_after_scaling(trial)))


def as_left(scale: float, *, clipped: bool = False, by: float = 1.0) -> Trial:
    """As if gradients were `scale` times the reference's when backward ended, and the optimizer was given the reference's,
    clipped or not, times `by`."""
    trial = trial_of(CASE)

    def altered(step: StepEvidence) -> StepEvidence:
        given = by * (coefficient(trial, step.step) if clipped else 1.0)
        return replace(step, gradients={f: scale * g for f, g in step.gradients.items()}, scaled=given / scale)

    ranks = {rank: replace(e, steps=tuple(map(altered, e.steps))) for rank, e in trial.ranks.items()}
    return replace(trial, run=replace(trial.run, ranks=ranks))


def gradients_of(trial: Trial, number: int = 1) -> float:
    """What the gradients judged are of the reference's."""
    _, step, reference = next(each for each in trial.steps_with_reference() if each[1].step == number)
    fqn = next(iter(step.gradients))
    return float(step.gradients[fqn].flat[0] / reference.gradients[fqn].flat[0])


def test_gradients_before_clipping_are_those_at_the_end_of_backward() -> None:
    trial = seen(1.0, clipped=True)
    assert coefficient(trial, 1) < 1
    assert gradients_of(trial) == 1.0
    assert judged("gradients", trial).verdict is Verdict.PASS


def test_what_a_recipe_divides_by_is_no_clipping() -> None:
    trial = seen(64.0)
    assert gradients_of(trial) == 1.0
    assert judged("gradients", trial).verdict is Verdict.PASS


def test_a_scale_that_is_wrong_is_not_hidden_by_a_trainers_own_clipping() -> None:
    assert judged("gradients", seen(2.0, clipped=True, by=0.9)).verdict is Verdict.FAIL


def test_gradients_divided_and_clipped_by_a_trainer_itself_are_unknown() -> None:
    trial = seen(64.0, clipped=True)
    result = judged("gradients", trial)
    assert result.verdict is Verdict.UNKNOWN and "note_gradients()" in result.note


def test_gradients_of_what_is_no_parameter_of_the_references_are_not_compared() -> None:
    trial = trial_of(CASE)
    for rank in trial.ranks:
        for step in trial.ranks[rank].steps:
            trial = with_step(trial, rank, step.step, gradients={"wqkv": np.ones(4)} | step.gradients, scaled=0.5)
    assert steps_right_after_scaling(trial) == set()


def test_evidence_that_was_written_when_no_bound_was_known_is_unknown_and_not_wrong() -> None:
    trial = as_left(64.0)
    assert steps_right_after_scaling(trial) == {1, 2, 3}
    assert judged("gradients", trial).verdict is Verdict.UNKNOWN
    assert steps_right_after_scaling(seen(64.0)) == set()
