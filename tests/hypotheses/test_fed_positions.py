"""Positions that are not those of the tokens: what is told, and what is assumed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from caused import cause_of, data_of
from diagnosed import broken
from literal import ADAMW, EIGHT, judged, tiny_case, trial_of, with_step
from trained import RECIPE, Ran, _ran, case_of, reference  # noqa: F401

from harness.core.case.dims import ParallelDims
from harness.core.checks.positions import within_documents
from harness.core.evidence.text import positions_text
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.hypotheses.received import other_positions, wrong_positions

LENGTH_16 = replace(ADAMW, seq_len=16)


def told(trial: Trial, rank: int, at: np.ndarray, steps: Sequence[int] = (1, 2, 3)) -> Trial:
    for step in steps:
        trial = with_step(trial, rank, step, positions=(at,))
    return trial


SHORT = trial_of(tiny_case(ParallelDims(cp=2), EIGHT, cp_load_balance=False))
VARYING = trial_of(tiny_case(ParallelDims(cp=2), replace(LENGTH_16, variable_length=True), cp_load_balance=False))


@pytest.mark.parametrize(
    ("trial", "ranks", "first"),
    [
        (told(SHORT, 1, np.arange(4)), (1,), 0),
        (told(told(SHORT, 0, np.arange(1, 5)), 1, np.arange(5, 9)), (0, 1), 1),
        (told(VARYING, 1, np.arange(8, 12), [2]), (1,), 8),
    ],
)
def test_positions_that_are_not_those_of_the_tokens(trial: Trial, ranks: tuple[int, ...], first: int) -> None:
    assert judged("positions", trial).verdict is Verdict.FAIL
    cause = wrong_positions(trial)
    assert cause is not None and data_of(cause, "ranks", "first") == ("positions", ranks, first)
    assert cause_of(trial).kind == "positions"


def test_the_model_is_assumed_to_turn_by_the_positions_that_it_was_given(ran: Ran) -> None:
    trial = told(ran(case_of(ParallelDims(cp=2), cp_load_balance=False)), 1, np.arange(4))
    (one,) = other_positions(trial, broken("positions"))
    assert one.assume is not None
    assumed = one.assume(trial)
    assert assumed.reference.steps[0].loss != trial.reference.steps[0].loss
    assert not list(other_positions(SHORT, broken("positions")))
    assert cause_of(trial).kind == "positions"  # and right numbers are not explained by them
    assert "loss" not in cause_of(trial).explains


def test_positions_in_documents_are_assumed_of_each_sample_and_compared_with_the_nearest_right_ones(ran: Ran) -> None:
    recipe = replace(RECIPE, document_mask=True)
    trial = ran(case_of(ParallelDims(cp=2), training=recipe, cp_load_balance=False))
    half = trial.case.training.seq_len // 2
    known = dict(zip(trial.reference.sample_ids, trial.reference.tokens, strict=True))
    for step in trial.case.steps:
        right = np.stack([within_documents(known[id_])[half:] for id_ in trial.reference.samples[step - 1]])
        trial = told(trial, 1, right, [step])
    assert judged("positions", trial).verdict is Verdict.PASS
    anew = right.copy()
    anew[:, 0] += 1
    trial = told(trial, 1, anew, [3])
    assert judged("positions", trial).findings[0].expected == positions_text(right[0])
    (one,) = other_positions(trial, broken("positions"))
    assert one.assume is not None
    off = [abs(a.loss - b.loss) for a, b in zip(one.assume(trial).reference.steps, trial.reference.steps, strict=True)]
    assert max(off[:2]) < 1e-12 and off[2] > 1e-6
