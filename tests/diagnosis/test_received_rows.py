"""Rows put together from what ranks received, and the labels that lie beside them. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import fsdp_4
from literal import ADAMW, tiny_case, trial_of, with_step, without_rank, without_step
from literal_ranks import microbatch_of

from harness.diagnosis.received import (
    Rows,
    labelled_otherwise,
    own_labels,
    paired_otherwise,
    received,
    repeated_microbatches,
    seen_labels,
    shift_of,
)
from harness.evidence.step import Microbatch
from harness.judge.trial import Trial
from harness.plan.stages import positions
from harness.spec.dims import ParallelDims

ONE_TOKEN = np.full((2, 8), 3)
ROW = np.arange(16).reshape(2, 8)


def with_labels(trial: Trial, rank: int, labels: np.ndarray | None) -> Trial:
    """In its only microbatch of step 1."""
    (part,) = trial.ranks[rank].steps[0].microbatches
    return with_step(trial, rank, 1, microbatches=(replace(part, labels=labels),))


@pytest.mark.parametrize(("by", "told"), [(0, 0), (1, 1), (-1, -1), (4, 4), (-4, -4), (5, None), (-5, None)])
def test_labels_are_those_of_as_many_places_later_up_to_four(by: int, told: int | None) -> None:
    longer = np.arange(12 * 2).reshape(2, 12)
    assert shift_of(np.roll(longer, -by, axis=1), longer) == told


def test_of_labels_that_fit_at_several_places_the_nearest_counts() -> None:
    assert shift_of(ONE_TOKEN, ONE_TOKEN) == 0


def test_too_few_labels_to_tell_are_at_no_place() -> None:
    assert shift_of(ROW[:, :3], ROW) is None
    assert shift_of(ROW[:, :4], ROW) == 0
    assert shift_of(ROW[:, :3], ROW[:, :7]) == 0


def test_labels_of_as_many_positions_as_overlap_with_half_a_row_or_more_tell_their_place() -> None:
    assert shift_of(ROW[:, 1:4], ROW) is None
    assert shift_of(ROW[:, 1:5], ROW) == 1
    assert shift_of(np.hstack([ROW[:, :3], ROW[:, 3:7]]), ROW) == 0
    assert shift_of(np.hstack([[[-9], [-9]], ROW[:, :4]]), ROW) == -1
    assert shift_of(np.hstack([[[-9], [-9]], ROW[:, :3]]), ROW) is None


# ---- rows of a step


def same(rows: Rows | None, tokens: np.ndarray, labels: np.ndarray, *, whole: bool = True) -> bool:
    assert rows is not None and rows.tokens.dtype == rows.labels.dtype == np.int64
    return np.array_equal(rows.tokens, tokens) and np.array_equal(rows.labels, labels) and rows.whole is whole


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("balanced", [True, False])
@pytest.mark.parametrize("layout", [ParallelDims(dp_shard=4), ParallelDims(dp_shard=2, cp=2), ParallelDims(tp=2)])
def test_what_ranks_received_makes_up_the_samples_of_the_step(layout: ParallelDims, balanced: bool, step: int) -> None:
    trial = trial_of(tiny_case(layout, replace(ADAMW, seq_len=16), cp_load_balance=balanced))
    own = slice(8 * step - 8, 8 * step)
    assert same(received(trial, step), trial.reference.tokens[own], trial.reference.labels[own])


@pytest.mark.parametrize("balanced", [True, False])
def test_parts_that_were_cut_as_if_balanced_otherwise_make_up_the_samples_too(balanced: bool) -> None:
    requested, cut = (
        trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16), cp_load_balance=by))
        for by in (balanced, not balanced)
    )
    rows = received(replace(requested, run=cut.run), 1)
    assert same(rows, requested.reference.tokens[:8], requested.reference.labels[:8])


@pytest.mark.parametrize("balanced", [True, False])
def test_rows_of_no_sample_lie_as_planned_over_cp_and_their_labels_are_those_that_were_seen(balanced: bool) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16), cp_load_balance=balanced))
    tokens, labels = trial.reference.tokens[:8] + 50, trial.reference.labels[:8]
    for rank in (0, 1):
        trial = with_microbatch(trial, rank, tokens=tokens[:, positions(trial.case, rank, 16)])
    assert same(received(trial, 1), tokens, labels)


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_of_a_step_that_a_rank_did_not_get_or_got_in_pieces_of_another_length_there_are_no_rows(rank: int) -> None:
    trial = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), replace(ADAMW, seq_len=16)))
    (part,) = trial.ranks[rank].steps[0].microbatches
    assert received(without_step(trial, rank, 1), 1) is None
    assert received(with_microbatch(trial, rank, tokens=None), 1) is None
    assert received(with_microbatch(trial, rank, tokens=part.tokens[:, :-1]), 1) is None
    assert received(with_microbatch(trial, rank, tokens=part.tokens + 50), 1) is not None


def test_without_a_first_stage_there_are_no_rows() -> None:
    assert received(without_rank(trial_of(tiny_case("single")), 0), 1) is None


@pytest.mark.parametrize("ids", [range(8), [50, 51]])
def test_cp_ranks_that_receive_the_same_part_of_a_sequence_make_up_no_rows(ids: list[int]) -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16)))
    first = trial.ranks[0].steps[0].microbatches
    assert received(with_step(trial, 1, 1, microbatches=first), 1) is None


def with_microbatch(trial: Trial, rank: int, **changes: Any) -> Trial:
    """Its only one of step 1."""
    (part,) = trial.ranks[rank].steps[0].microbatches
    return with_step(trial, rank, 1, microbatches=(replace(part, **changes),))


# ---- their labels


def test_the_labels_of_a_sample_are_its_own_and_those_of_other_rows_their_next_tokens() -> None:
    reference = fsdp_4().reference
    tokens = np.stack([reference.tokens[3], [50, 51, 52, 53]])
    assert own_labels(fsdp_4(), tokens).tolist() == [reference.labels[3].tolist(), [51, 52, 53, -100]]
    assert own_labels(fsdp_4(), tokens[:, :3]).tolist() == [reference.labels[3, :3].tolist(), [51, 52, -100]]


def test_rows_are_whole_only_if_each_token_has_its_label_on_every_rank() -> None:
    right = fsdp_4()
    rows = received(right, 1)
    assert rows is not None and rows.whole
    (part,) = right.ranks[2].steps[0].microbatches
    assert part.labels is not None
    shorter = received(with_labels(right, 2, part.labels[:, :-1]), 1)
    assert shorter is not None and not shorter.whole


def test_where_nobody_saw_labels_those_of_the_samples_are_taken() -> None:
    right = fsdp_4()
    unseen, rows = received(with_labels(right, 2, None), 1), received(right, 1)
    assert unseen is not None and rows is not None and unseen.whole
    assert np.array_equal(unseen.labels, rows.labels)


def test_rows_are_not_whole_if_one_of_several_microbatches_or_cp_ranks_has_not_a_label_a_token() -> None:
    cases = {0: tiny_case("single", accumulation=2), 1: tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16))}
    for case, places in ((cases[0], [(0, 0), (0, 1)]), (cases[1], [(0, 0), (1, 0)])):
        trial = trial_of(case)
        own = trial.reference.labels[:8]
        for rank, number in places:
            parts = list(trial.ranks[rank].steps[0].microbatches)
            labels = parts[number].labels
            assert labels is not None
            parts[number] = replace(parts[number], labels=np.hstack([labels, labels]))  # which lie in no way
            rows = received(with_step(trial, rank, 1, microbatches=tuple(parts)), 1)
            assert same(rows, trial.reference.tokens[:8], own, whole=False)


def test_the_labels_of_each_microbatch_lie_beside_its_own_tokens() -> None:
    trial = trial_of(tiny_case("single", accumulation=2))
    first, second = trial.ranks[0].steps[0].microbatches
    assert first.labels is not None and second.labels is not None
    otherwise = (replace(first, labels=first.labels + 1), replace(second, labels=second.labels + 2))
    labels = np.vstack([first.labels + 1, second.labels + 2])
    assert same(received(with_step(trial, 0, 1, microbatches=otherwise), 1), trial.reference.tokens[:8], labels)
    unseen = (*otherwise, replace(second, tokens=None))  # 8 rows are not those of 3 losses
    assert same(
        received(with_step(trial, 0, 1, microbatches=unseen), 1),
        trial.reference.tokens[:8],
        trial.reference.labels[:8],
    )


def test_labels_that_do_not_match_are_told_by_the_number_of_their_microbatch() -> None:
    trial = trial_of(tiny_case("single", replace(ADAMW, seq_len=16), accumulation=4))
    parts = list(trial.ranks[0].steps[0].microbatches)
    assert labelled_otherwise(trial, 0, 1) == set()
    parts[1] = replace(parts[1], labels=parts[2].labels)
    parts[2] = replace(parts[2], labels=None)
    parts[3] = replace(parts[3], labels=parts[0].labels)
    trial = with_step(trial, 0, 1, microbatches=tuple(parts))
    assert labelled_otherwise(trial, 0, 1) == {2, 4}
    assert labelled_otherwise(trial, 0, 2) == set()
    labels = parts[1].labels
    assert labels is not None
    parts[1] = replace(parts[1], labels=np.hstack([labels, labels]))
    parts[3] = replace(parts[3], tokens=None)
    assert labelled_otherwise(with_step(trial, 0, 1, microbatches=tuple(parts)), 0, 1) == set()


def test_of_a_cp_rank_no_labels_are_told_not_to_match() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16)))
    assert labelled_otherwise(with_microbatch(trial, 0, labels=np.full((8, 8), 3)), 0, 1) == set()


def test_microbatches_of_the_same_samples_in_any_order_are_told_by_the_first() -> None:
    trial = trial_of(tiny_case("single", accumulation=4))
    numbers = [[4, 5], [0, 1], [2, 3], [1, 0], [2, 3], [0, 1], [0, 2]]
    parts = [microbatch_of(trial.reference, ids) for ids in numbers]
    again = with_step(trial, 0, 1, microbatches=tuple(parts))
    assert repeated_microbatches(again, 0, 1) == {2: [4, 6], 3: [5]}
    assert repeated_microbatches(again, 0, 2) == {}
    unseen = (replace(parts[0], tokens=None), *parts[1:3], parts[2])
    assert repeated_microbatches(with_step(trial, 0, 1, microbatches=unseen), 0, 1) == {2: [3]}


@pytest.mark.parametrize(
    ("order", "told"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], None),
        ([0, 2, 1, 3, 4, 5, 6, 7], (2, 3)),
        ([0, 1, 7, 3, 4, 5, 6, 2], (3, 8)),
        ([0, 1, 1, 3, 4, 5, 6, 7], None),
    ],
)
def test_labels_of_rows_in_another_order_are_told_by_the_first_and_whose_it_has(
    order: list[int], told: tuple[int, int] | None
) -> None:
    trial = trial_of(tiny_case("single", replace(ADAMW, seq_len=16)))
    labels = trial.reference.labels[:8][order]
    trial = with_microbatch(trial, 0, labels=labels)
    assert paired_otherwise(trial, 1) == told
    assert paired_otherwise(with_microbatch(trial, 0, labels=np.hstack([labels, labels])), 1) is None
    assert paired_otherwise(with_microbatch(trial, 0, tokens=None), 1) is None


OWN = np.array([[1, 2, 3, 4, 5, 6, 7, 8], [9, 10, 11, 12, 13, 14, 15, 16]])


def in_chunks(columns: np.ndarray, *widths: int) -> Microbatch:
    """Labels of a loss that is computed in several calls, each of so many positions of all samples."""
    ends = np.cumsum(widths)[:-1]
    chunks = [chunk.reshape(-1) for chunk in np.split(columns, ends, axis=1)]
    sizes = tuple(len(chunk) for chunk in chunks)
    return Microbatch(OWN, np.concatenate(chunks), 1.0, columns.size, sizes)


@pytest.mark.parametrize(
    ("by", "columns", "laid"),
    [
        (0, OWN, OWN),
        (1, OWN[:, 1:], np.hstack([OWN[:, 1:], [[-100], [-100]]])),
        (2, OWN[:, 2:], np.hstack([OWN[:, 2:], [[-100, -100], [-100, -100]]])),
        (1, np.hstack([OWN[:, 1:], [[30], [31]]]), np.hstack([OWN[:, 1:], [[30], [31]]])),
        (-1, np.hstack([[[30], [31]], OWN[:, :-1]]), np.hstack([[[30], [31]], OWN[:, :-1]])),
    ],
)
@pytest.mark.parametrize("chunked", [True, False])
def test_labels_of_later_tokens_lie_in_rows_though_the_loss_is_computed_in_chunks_along_the_sequence(
    by: int, columns: np.ndarray, laid: np.ndarray, chunked: bool
) -> None:
    part = in_chunks(columns, 3, 2, columns.shape[1] - 5) if chunked else Microbatch(OWN, columns, 1.0, columns.size)
    seen = seen_labels(part, OWN)
    assert seen is not None and np.array_equal(seen, laid) and shift_of(seen[:, : columns.shape[1]], OWN) == by


def test_labels_of_which_those_that_do_not_count_are_left_out_are_not_taken_for_shifted_ones() -> None:
    own = np.array([[-100, 3, 3, 3, 3, 3, 3, 3]] * 2)
    seen = seen_labels(Microbatch(own, own[:, 1:], 1.0, 14), own)
    assert seen is not None and seen.tolist() == own.tolist()


def test_labels_that_are_too_many_or_do_not_make_up_rows_lie_in_no_way() -> None:
    longer = np.hstack([OWN, [[30], [31]]])
    assert seen_labels(in_chunks(longer, 4, 5), OWN) is None
    assert seen_labels(Microbatch(OWN, OWN.reshape(-1)[:-1], 1.0, 15), OWN) is None
    assert seen_labels(Microbatch(OWN, OWN.reshape(-1)[:-2], 1.0, 14, (7, 7)), OWN) is None
    whole = seen_labels(Microbatch(OWN, OWN + 50, 1.0, 16, (7, 9)), OWN)
    assert whole is not None and whole.tolist() == (OWN + 50).tolist()


def test_cp_ranks_that_receive_different_numbers_of_rows_make_up_none() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), replace(ADAMW, seq_len=16)))
    rows, right = received(trial, 1), trial.ranks[1].steps[0].microbatches[0]
    assert rows is not None and rows.tokens.shape == (8, 16)
    fewer = replace(right, tokens=right.tokens[:-1], labels=None)
    assert received(with_step(trial, 1, 1, microbatches=(fewer,)), 1) is None
