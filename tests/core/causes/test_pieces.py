"""Of which tokens each piece of a gradient is, in steps of any length and in those of an earlier launch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import NORM, fsdp_4, received
from literal import EIGHT, tiny_case, trial_of, with_step_1_gradients, with_value
from noisy import with_noise

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes.pieces import TOLERATED_RESIDUAL, FittedWeights, Pieces, fit_weights
from harness.core.judge.trial import Trial
from harness.core.plan.stages import token_positions_of_rank

SIXTEEN = replace(EIGHT, seq_len=16, variable_length=True)


def at(trial: Trial, pieces: Pieces, step: int) -> list[tuple[list[int], list[int]]]:
    """Of each piece, the rows of the step's batch and the positions that count, each once."""
    found = []
    for piece in range(len(pieces.all)):
        mask = pieces.token_mask(piece, step)
        assert mask.shape == (len(trial.reference.samples[step - 1]), trial.case.seq_len(step))
        assert set(np.unique(mask)) == {0.0, 1.0} and pieces.token_mask(piece, step) is mask
        rows, places = (np.unique(each).tolist() for each in mask.nonzero())
        assert mask[np.ix_(rows, places)].all()
        found.append((rows, places))
    return found


def test_a_piece_is_a_sample_of_a_share_or_what_a_cp_rank_receives_of_it() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2, tp=2), SIXTEEN))
    pieces = Pieces(trial)
    assert pieces.all[:3] == ((0, 0, 0, 0), (0, 0, 1, 0), (0, 1, 0, 0)) and len(pieces.all) == 16
    assert pieces.all[8] == (4, 0, 0, 0) and pieces.all_received_once
    for step in (1, 2):
        wanted = [
            ([row], token_positions_of_rank(trial.case, 2 * place, trial.case.seq_len(step)).tolist())
            for row in range(8)
            for place in (0, 1)
        ]
        assert at(trial, pieces, step) == [(rows, sorted(places)) for rows, places in wanted]
    assert trial.case.seq_len(2) < trial.case.seq_len(1)


def test_a_piece_may_be_a_chunk_of_what_a_cp_rank_receives() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), SIXTEEN, cp_load_balance=False))
    pieces = Pieces(trial, 2)
    assert pieces.all[:5] == ((0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 1, 0), (0, 0, 1, 1), (0, 1, 0, 0))
    four = [[*range(first, first + 4)] for first in (0, 4, 8, 12)]
    assert at(trial, pieces, 1) == [([row], places) for row in range(8) for places in four]


def test_a_piece_is_where_its_sample_stands_in_the_batch_of_each_step() -> None:
    trial = received(fsdp_4(), 1, 2, [11, 10])
    pieces = Pieces(trial)
    assert pieces.all_received_once
    assert [rows for rows, _ in at(trial, pieces, 1)] == [[row] for row in range(8)]
    assert [rows for rows, _ in at(trial, pieces, 2)] == [[0], [1], [3], [2], [4], [5], [6], [7]]


def test_in_steps_of_an_earlier_launch_pieces_are_dealt_as_requested() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), EIGHT, resume=(Saved(1, ParallelDims()),)))
    assert trial.first_step == 2
    pieces = Pieces(trial)
    assert [rows for rows, _ in at(trial, pieces, 1)] == [[row] for row in range(8) for _ in (0, 1)]


@pytest.mark.parametrize(
    ("rank", "step", "ids"), [(3, 2, [14, 14]), (3, 2, [14, 1]), (3, 2, [14]), (3, 1, [6, 5]), (3, 3, [])]
)
def test_pieces_are_known_where_each_sample_is_received_once_in_every_step(
    rank: int, step: int, ids: list[int]
) -> None:
    assert Pieces(fsdp_4()).all_received_once and not Pieces(received(fsdp_4(), rank, step, ids)).all_received_once


def test_valid_tokens_are_those_with_a_label_of_the_step_s_length_token_0_among_them() -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=4, cp=2), SIXTEEN))
    labels = trial.reference.labels.copy()
    labels[labels > 2] = 0
    labels[8, 1] = labels[9, 9] = -100
    trial = replace(trial, reference=replace(trial.reference, labels=labels))
    pieces, length = Pieces(trial), trial.case.seq_len(2)
    assert length == 8
    wanted = [
        float((labels[8 + row, token_positions_of_rank(trial.case, place, length)] >= 0).sum())
        for row in range(8)
        for place in (0, 1)
    ]
    assert pieces.valid_tokens(2).tolist() == wanted and sum(wanted) < 64


# ---- what is a sum of them


def fitted(trial: Trial) -> FittedWeights | None:
    pieces = Pieces(trial)
    return fit_weights(trial, pieces, pieces.gradients(1), 1)


def test_in_float64_a_gradient_is_a_sum_within_a_millionth_and_in_noise_within_its_bound() -> None:
    right = fsdp_4()
    wrong = with_step_1_gradients(right, lambda _, fqn: 2 * right.reference.steps[0].gradients[fqn])
    found = fitted(wrong)
    assert found is not None and found.tolerance == TOLERATED_RESIDUAL and found.fqns == (*wrong.plan.shapes,)
    off = with_value(wrong, 0, 1, "gradients", NORM, lambda gradient: gradient + 1e-3)
    assert fitted(off) is None
    rough: Any = with_noise(off, gradient=1e-2)
    assert rough.bounds.gradient[1] > 1e-3
    loose = fitted(rough)
    assert loose is not None and TOLERATED_RESIDUAL < loose.tolerance < rough.bounds.gradient[1]
    assert loose.is_same_weight(np.array([2.0]), 2.0 + loose.tolerance) and not loose.is_same_weight(
        np.array([2.0]), 2.0 + 5 * loose.tolerance
    )
    assert fitted(right) is None, "nothing is wrong"
