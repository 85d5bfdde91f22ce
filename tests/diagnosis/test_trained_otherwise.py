"""What is assumed of data and weights is trained in earnest: it is named where it explains the numbers, and only there."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from literal import with_step
from trained import RECIPE, Ran, _ran, case_of, diagnosed, proven, reference  # noqa: F401

from harness.checks import judge
from harness.judge.trial import Trial
from harness.reference.record import ReferenceRun
from harness.reference.train import train


def not_explained(trial: Trial) -> bool:
    return bool({"not explained", "tried"} & dict(diagnosed(trial).evidence).keys())


def test_a_run_that_is_right_breaks_no_law(ran: Ran) -> None:
    failed = {result.check for result in judge(ran(case_of())) if result.verdict == "FAIL"}
    assert failed == set()


def drawn_with_another_seed() -> ReferenceRun:
    return train(case_of().model, replace(RECIPE, seed=99), weights=reference(case_of()).weights)


def test_samples_of_another_seed_explain_all_numbers(ran: Ran) -> None:
    trial = ran(case_of(), drawn_with_another_seed())
    assert proven(trial)[0] == "samples of no step"
    assert not not_explained(trial)


def test_other_gradients_beside_other_samples_are_not_explained_by_these(ran: Ran) -> None:
    trial = ran(case_of(), drawn_with_another_seed())
    for rank, evidence in trial.ranks.items():
        noise = np.random.default_rng(rank)
        wrong = {fqn: g + noise.standard_normal(g.shape) for fqn, g in evidence.steps[0].gradients.items()}
        trial = with_step(trial, rank, 1, gradients=wrong)
    assert diagnosed(trial).kinds[0] == "samples of no step"
    assert "gradients are wrong" in dict(diagnosed(trial).evidence)["not explained"]


def test_weights_of_another_seed_explain_all_numbers(ran: Ran) -> None:
    other = train(case_of().model, replace(RECIPE, seed=99)).weights
    trial = ran(case_of(), weights=other)
    assert proven(trial)[0] == "other initial weights"
    assert not not_explained(trial)
