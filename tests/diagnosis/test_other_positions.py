"""By which positions a model is assumed to turn keys and queries. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import broken, here
from literal import ADAMW, TINY, tiny_case, trial_of, with_step, without_step

from harness.diagnosis import assume
from harness.diagnosis.positions import _positions_by_layer, other_positions, wrong_positions
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.make_plan import make_plan
from harness.reference import spellings as altered
from harness.spec.dims import ParallelDims

EIGHT = replace(ADAMW, seq_len=8)
RESTARTED = [0, 1, 2, 3, 0, 1, 2, 3]


def cp_trial(dims: ParallelDims, **recipe: object) -> Trial:
    return trial_of(tiny_case(dims, replace(EIGHT, **recipe), cp_load_balance=False))


def told(trial: Trial, rank: int, step: int, *rows: list[int]) -> Trial:
    return with_step(trial, rank, step, positions=tuple(map(np.array, rows)))


def by_layer(trial: Trial, step: int) -> dict[int, list[int]]:
    return {layer: row.tolist() for layer, row in _positions_by_layer(trial, step).items()}


def test_positions_are_put_together_from_what_the_ranks_of_a_cp_group_are_told_in_a_step() -> None:
    trial = told(cp_trial(ParallelDims(cp=2)), 1, 2, [0, 1, 2, 3])
    assert [by_layer(trial, step) for step in (1, 2, 3)] == [{0: [*range(8)]}, {0: RESTARTED}, {0: [*range(8)]}]
    several = told(trial, 1, 2, [0, 1, 2, 3], [4, 5, 6, 7])
    assert by_layer(several, 2) == by_layer(told(trial, 1, 2), 2) == {0: [*range(8)]}
    of_each_row = with_step(trial, 1, 2, positions=(np.array([[3, 2, 1, 0]] * 4),))
    assert by_layer(of_each_row, 2) == {0: [0, 1, 2, 3, 3, 2, 1, 0]}
    assert by_layer(without_step(trial, 1, 2), 2) == {0: [*range(8)]}


def test_of_replicas_the_first_one_tells_the_positions() -> None:
    trial = told(cp_trial(ParallelDims(dp_replicate=2, cp=2)), 3, 1, [0, 1, 2, 3])
    assert by_layer(trial, 1) == {0: [*range(8)]}
    assert by_layer(told(trial, 1, 1, [0, 1, 2, 3]), 1) == {0: RESTARTED}


def test_positions_of_a_shorter_step_are_those_of_its_length() -> None:
    trial = cp_trial(ParallelDims(cp=2), variable_length=True)
    lengths = [trial.case.seq_len(step) for step in trial.case.steps]
    assert len({*lengths}) > 1
    assert [len(by_layer(trial, step)[0]) for step in trial.case.steps] == lengths
    short = next(step for step, length in zip(trial.case.steps, lengths, strict=True) if length == 4)
    assert by_layer(told(trial, 1, short, [0, 1]), short) == {0: [0, 1, 0, 1]}
    found = wrong_positions(told(trial, 1, short, [0, 1]))
    assert found == Cause(
        "positions",
        "rotary positions restart at 0 on each cp rank",
        hint="rank 1 receives positions 0-1 for its tokens at 2-3",
    )
    unknown = with_step(trial, 1, short, positions=(np.array([3, 1]), np.array([0, 1])), microbatches=())
    assert wrong_positions(unknown) == Cause(
        "positions", "wrong rotary positions", hint="rank 1 receives positions 3 and 1 for its tokens at 2-3"
    )


def test_positions_of_each_stage_are_those_of_its_layers() -> None:
    trial = cp_trial(ParallelDims(cp=2))
    wrong = told(trial, 1, 1, [0, 1, 2, 3])
    assert by_layer(replace(wrong, plan=replace(trial.plan, stages={0: (0,), 1: ()})), 1) == {0: [*range(8)]}
    assert by_layer(replace(wrong, plan=replace(trial.plan, stages={0: (), 1: (0,)})), 1) == {0: RESTARTED}
    case = tiny_case(
        ParallelDims(pp=2, cp=2), EIGHT, cp_load_balance=False, model=replace(TINY, n_layers=2), microbatches=2
    )
    staged = replace(trial_of(tiny_case(ParallelDims(dp_shard=4), EIGHT)), case=case, plan=make_plan(case))
    assert by_layer(told(staged, 3, 1, [0, 1, 2, 3]), 1) == {0: [*range(8)], 1: RESTARTED}


def test_the_model_is_assumed_to_turn_by_the_positions_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    trained: list[dict[str, Any]] = []

    def retrain(model: object, recipe: object, reference: Any, **words: Any) -> Any:
        trained.append(words)
        return reference

    monkeypatch.setattr(altered, "turned_by", lambda by_step: ("turned by", by_step))
    monkeypatch.setattr(assume, "retrain", retrain)
    trial = told(cp_trial(ParallelDims(cp=2)), 1, 1, [0, 1, 2, 3])
    (one,) = other_positions(trial, broken("positions"))
    assert (one.fitted, one.seen, one.lines) == (
        1,
        ("positions",),
        (here("positions"),),
    )
    assert one.cause == wrong_positions(trial)
    assert one.assume is not None
    one.assume(trial)
    (words,) = trained
    _, by_step = words["altered"]
    assert {step: rows[0].tolist() for step, rows in by_step.items()} == {1: RESTARTED, 2: [*range(8)], 3: [*range(8)]}
    assert list(other_positions(trial, broken("loss"))) == []
    assert list(other_positions(cp_trial(ParallelDims(cp=2)), broken("positions"))) == []


def test_other_positions_without_cp_or_on_some_ranks_alone_do_not_restart() -> None:
    alone = told(trial_of(tiny_case("single", EIGHT)), 0, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert wrong_positions(alone) == Cause(
        "positions", "wrong rotary positions", hint="rank 0 receives positions 1-8 for its tokens at 0-7"
    )
    some = told(cp_trial(ParallelDims(cp=4)), 1, 1, [0, 1])
    assert wrong_positions(some) == Cause(
        "positions", "wrong rotary positions", hint="rank 1 receives positions 0-1 for its tokens at 2-3"
    )
