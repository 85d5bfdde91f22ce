"""By what the reference is trained again under a hypothesis, and what there is to compare. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import NORM
from literal import judged, tiny_case, trial_of, with_step

from harness.core.case.dims import ParallelDims
from harness.core.causes import assume, pieces
from harness.core.causes.differences import expected_gradient
from harness.core.causes.pieces import Pieces, assume_piece_weights
from harness.hypotheses.received import other_positions


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


def test_nothing_is_expected_of_a_parameter_that_a_rank_does_not_hold_or_the_reference_does_not_know() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    assert expected_gradient(trial, 0, NORM, 1) is not None
    assert expected_gradient(trial, 0, "norm.bias", 1) is None
    slices = {rank: {**held, "norm.bias": held[NORM]} for rank, held in trial.plan.slices.items()}
    assert expected_gradient(replace(trial, plan=replace(trial.plan, slices=slices)), 0, "norm.bias", 1) is None


def test_weights_that_are_alike_on_all_ranks_are_those_of_one_training_and_others_of_one_each(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    trial, copies = trial_of(tiny_case("hsdp_2x2")), []
    of = Pieces(trial)
    monkeypatch.setattr(pieces, "assume_separate_clipping", lambda trial: trial)
    monkeypatch.setattr(
        assume, "assume_separate_copies", lambda trial, replicas, *rest, **named: (copies.append(replicas), trial)[1]
    )
    once, twice = np.ones(len(of.all)), np.full(len(of.all), 2.0)
    for weights in (lambda step, rank: twice, lambda step, rank: twice if rank > 1 else once):
        assume_piece_weights(trial, of, tuple(trial.plan.shapes), weights, (1,))
    assert copies == [dict.fromkeys(range(4), 0), {0: 0, 1: 0, 2: 1, 3: 1}]
