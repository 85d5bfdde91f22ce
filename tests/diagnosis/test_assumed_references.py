"""By what the reference is trained again under a hypothesis, and what there is to compare. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import NORM
from literal import ADAMW, judged, tiny_case, trial_of, with_step, with_value

from harness.diagnosis import assume, pieces
from harness.diagnosis.differences import expected_gradient
from harness.diagnosis.localise import localise
from harness.diagnosis.pieces import Pieces, assuming
from harness.diagnosis.received import other_positions
from harness.diagnosis.request import neighbours
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, dict[str, Any]]]:
    """The recipe by which a reference was trained again, and what was altered."""
    seen: list[tuple[Any, dict[str, Any]]] = []
    monkeypatch.setattr(assume, "retrain", lambda model, recipe, old, **words: (seen.append((recipe, words)), old)[1])
    return seen


def test_angles_of_other_positions_are_given_to_the_model_that_is_trained_again(trained: list[Any]) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), cp_load_balance=False))
    for step in trial.case.steps:
        trial = with_step(trial, 1, step, positions=(np.arange(2)[None],))
    (one,) = other_positions(trial, {"positions": judged("positions", trial)})
    one.assume(trial)
    ((recipe, words),) = trained
    assert recipe == trial.case.training and list(words) == ["altered"]


def test_another_dtype_of_matmuls_is_another_recipe_of_which_there_is_another_reference(trained: list[Any]) -> None:
    requested = tiny_case("single", replace(ADAMW, dtype="float32"))
    bfloat16 = replace(requested.training, compute_dtype="bfloat16")
    trial = trial_of(requested, ran=replace(requested, training=bfloat16))
    found = list(neighbours(trial, {"features": judged("features", trial)}))
    (one,) = (one for one in found if one.cause.details == (("compute_dtype", "bfloat16"),))
    assert one.assume(trial).case.training == bfloat16
    assert [recipe for recipe, _ in trained] == [bfloat16]


def test_nothing_is_expected_of_a_parameter_that_a_rank_does_not_hold_or_the_reference_does_not_know() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert expected_gradient(trial, 0, NORM, 1) is not None
    assert expected_gradient(trial, 0, "norm.bias", 1) is None
    slices = {rank: {**held, "norm.bias": held[NORM]} for rank, held in trial.plan.slices.items()}
    assert expected_gradient(replace(trial, plan=replace(trial.plan, slices=slices)), 0, "norm.bias", 1) is None


def test_an_update_that_is_wrong_before_any_gradient_is_what_is_located() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_value(trial, 1, 1, "parameters", NORM, lambda p: p + 1)
    trial = with_value(trial, 0, 2, "gradients", NORM, lambda g: g + np.arange(2))
    broken = {check: judged(check, trial) for check in ("update", "gradients")}
    cause, _ = localise(trial, broken, 0)
    assert cause.observed == "the update is wrong, gradients before clipping are right"
    found = cause.finding
    assert found is not None and (found.rank, found.step, found.name) == (1, 1, NORM)
    assert "gradients" in cause_line(localise(trial, {"gradients": broken["gradients"]}, 0)[0])


def test_weights_that_are_alike_on_all_ranks_are_those_of_one_training_and_others_of_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial, copies = trial_of(tiny_case("hsdp_2x2")), []
    of = Pieces(trial)
    monkeypatch.setattr(pieces, "clipping_apart", lambda trial: trial)
    monkeypatch.setattr(assume, "apart", lambda trial, replicas, *rest, **named: (copies.append(replicas), trial)[1])
    once, twice = np.ones(len(of.all)), np.full(len(of.all), 2.0)
    for weights in (lambda step, rank: twice, lambda step, rank: twice if rank > 1 else once):
        assuming(trial, of, tuple(trial.plan.shapes), weights, (1,))
    assert copies == [dict.fromkeys(range(4), 0), {0: 0, 1: 0, 2: 1, 3: 1}]
