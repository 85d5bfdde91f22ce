"""Backward passes a multiple on to the outputs of modules; the reference was trained so, and is judged by the right one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import with_step
from trained import Ran, _ran, case_of, diagnosed  # noqa: F401

from harness.core.causes.hypothesis import Hypothesis
from harness.core.checks import judge
from harness.core.checks.gradients import check
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.hypotheses.passed_back import multiples_passed_back
from harness.reference.spellings import scale_output_gradients

WO = ("layers.0.attention.wo",)


@pytest.mark.parametrize(("modules", "factor"), [(WO, 2.0), (("layers.0.ffn_norm",), 0.5), (WO, 0.0)])
def test_the_modules_and_the_factor_are_found(ran: Ran, modules: tuple[str, ...], factor: float) -> None:
    trial = ran(case_of(), altered=scale_output_gradients(modules, factor, (1, 2, 3)))
    (cause,) = diagnosed(trial).causes
    assert cause.kind == ("gradients scaled" if factor else "lost in backward") and len(cause.explains) == 5
    assert dict(cause.details) == {"modules": modules, "factor": pytest.approx(factor), "steps": (1, 2, 3)}


def test_what_begins_in_a_later_step_is_found_in_it(ran: Ran) -> None:
    trial = ran(case_of(), altered=scale_output_gradients(WO, 2.0, (2, 3)))
    (cause,) = diagnosed(trial).causes
    assert (cause.kind, dict(cause.details)["steps"]) == ("gradients scaled", (2, 3))


def test_a_tied_weight_that_lacks_the_embeddings_part(ran: Ran) -> None:
    case = case_of(model=replace(case_of().model, tied_embeddings=True))
    (cause,) = diagnosed(ran(case, altered=scale_output_gradients(("tok_embeddings",), 0.0, (1, 2, 3)))).causes
    assert (cause.kind, dict(cause.details)["modules"]) == ("lost in backward", ("tok_embeddings",))


def test_modules_of_one_layer_and_of_all_layers_are_told_apart(ran: Ran) -> None:
    case, both = case_of(model=replace(case_of().model, n_layers=2)), (*WO, "layers.1.attention.wo")
    for modules in (both, both[1:]):
        trial = ran(case, altered=scale_output_gradients(modules, 2.0, (1, 2, 3)))
        right = [
            dict(one.cause.details)["modules"]
            for one in proposed(trial)
            if one.assume and check(one.assume(trial)).verdict is Verdict.PASS
        ]
        assert right == [modules]


def proposed(trial: Trial) -> list[Hypothesis]:
    return list(multiples_passed_back(trial, {one.check: one for one in judge(trial) if one.findings}))


def test_gradients_that_are_no_multiples_and_those_that_all_are_have_no_such_place(ran: Ran) -> None:
    trial = ran(case_of())
    other = trial
    for rank in trial.ranks:
        gradients = trial.ranks[rank].steps[0].gradients
        shifted = {fqn: np.roll(value, 1) for fqn, value in gradients.items()}
        other = with_step(other, rank, 1, gradients={**gradients, **shifted})
    assert proposed(trial) == [] and proposed(other) == []
    scaled = ran(case_of(), gradients=lambda step, own: {fqn: 2 * g for fqn, g in own.items()})
    assert proposed(scaled) == []
