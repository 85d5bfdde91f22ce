"""Rows of tokens that are no sample's are told by what they are of one. Literal rows, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from literal import with_step
from trained import RECIPE, Ran, _ran, case_of  # noqa: F401

from harness.diagnosis import unknown_rows
from harness.diagnosis.data import wrong_samples
from harness.diagnosis.unknown_rows import begun_elsewhere, dealt_otherwise, described, further_ahead, of_sample
from harness.judge.trial import Trial
from harness.reference import data as reference_data
from harness.reference.data import build_dataset, sample_order, step_samples
from harness.spec.dims import ParallelDims

Rows = np.ndarray


def fed(trial: Trial, change: Callable[[int, Rows], Rows], step: int = 1) -> Trial:
    """change(rank, its rows) in the place of what a rank receives in a step."""
    for rank, evidence in trial.ranks.items():
        (part,) = evidence.steps[step - 1].microbatches
        assert part.tokens is not None
        trial = with_step(trial, rank, step, microbatches=(replace(part, tokens=change(rank, part.tokens)),))
    return trial


def following(trial: Trial, rows: Rows, by: int) -> Rows:
    """From a later token on; what comes after the sample is 1."""
    known = {row.tobytes(): labels for row, labels in zip(trial.reference.tokens, trial.reference.labels, strict=True)}
    whole = np.hstack([rows, np.stack([known[row.tobytes()][-1:] for row in rows]), np.ones((len(rows), by), int)])
    return whole[:, by : by + rows.shape[1]]


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda trial, rows: following(trial, rows, 1), "the step's samples from token 1 on (counted from 0)"),
        (lambda trial, rows: following(trial, rows, 3), "the step's samples from token 3 on (counted from 0)"),
        (
            lambda trial, rows: np.where(np.arange(8) < 6, rows, 0),
            "the first 6 tokens of the step's samples, then 0 only",
        ),
        (lambda trial, rows: np.random.default_rng(1).integers(1, 32, rows.shape), "none of the data set's"),
    ],
)
def test_what_rows_are_of_a_sample_is_told(ran: Ran, change: Callable[[Trial, Rows], Rows], told: str) -> None:
    trial = ran(case_of())
    assert described(fed(trial, lambda rank, rows: change(trial, rows)), 1, [0, 1]) == told


def test_of_a_data_set_that_is_another_or_too_large_or_not_there_nothing_is_told(
    ran: Ran, monkeypatch: pytest.MonkeyPatch
) -> None:
    trial = ran(case_of())
    trial = fed(trial, lambda rank, rows: np.random.default_rng(1).integers(1, 32, rows.shape))
    size = len(build_dataset(trial.case.training, trial.case.model))

    def told(trial: Trial, most: int = size) -> str:
        monkeypatch.setattr(unknown_rows, "MOST", most)
        return described(trial, 1, [0, 1])

    assert told(trial) == "none of the data set's"
    assert told(trial, size - 1) == ""
    tokens = trial.reference.tokens.copy()
    tokens[-1, 0] += 1
    assert told(replace(trial, reference=replace(trial.reference, tokens=tokens))) == ""

    def lost(*of: object) -> None:
        raise ValueError

    monkeypatch.setattr(reference_data, "build_dataset", lost)
    assert told(trial) == ""


def test_rows_of_several_kinds_are_told_by_none(ran: Ran) -> None:
    trial = ran(case_of())
    other = fed(trial, lambda rank, rows: following(trial, rows, 1 + rank))
    assert described(other, 1, [0, 1]) == "none of the data set's"


def test_a_rank_that_shuffles_by_another_seed_is_told_with_it(ran: Ran) -> None:
    case, trial = case_of(), ran(case_of())
    data = build_dataset(case.training, case.model)
    order = sample_order(case.training, len(data), 1)[:8]
    share = np.stack([data[index][0].numpy() for index in order])[1::2]
    cause = wrong_samples(fed(trial, lambda rank, rows: share if rank == 1 else rows))
    seed = case.training.seed
    told = f"samples of the data set in the order of seed {seed + 1}, or of epoch 1 (counted from 0)"
    assert cause is not None and cause.hint == told and cause.kind == "samples of no step"


def test_samples_that_are_not_shuffled_and_blocks_in_place_of_every_nth_are_told(ran: Ran) -> None:
    case, trial = case_of(), ran(case_of())
    data = build_dataset(case.training, case.model)
    order = sample_order(case.training, len(data), 0)
    for told, of_rank in (
        ("samples in the data set's own order, not shuffled", lambda rank: [*range(8)][rank::2]),
        (
            "each dp rank reads a block of the shuffled samples, requested every n-th sample",
            lambda rank: order[rank * (len(data) // 2) :][:4],
        ),
    ):
        rows = {rank: np.stack([data[index][0].numpy() for index in of_rank(rank)]) for rank in (0, 1)}
        cause = wrong_samples(fed(trial, lambda rank, _, rows=rows: rows[rank]))
        assert cause is not None and cause.hint == told


def test_a_sampler_that_deals_out_to_more_ranks_than_read_is_told_where_steps_are_mixed_up_and_where_rows_are_unknown(
    ran: Ran,
) -> None:
    trial = ran(case_of(ParallelDims(dp_shard=2, tp=2)))
    data = build_dataset(trial.case.training, trial.case.model)
    order = sample_order(trial.case.training, len(data), 0)
    own = trial.case.training.global_batch // 2
    told = (
        "each dp rank reads every 4th of the shuffled samples (one share per rank of the world), requested every second"
    )
    for step, kind in ((1, "samples dealt otherwise"), (trial.case.training.steps, "samples of no step")):
        ids = {rank: order[rank::4][(step - 1) * own : step * own] for rank in (0, 1)}
        rows = {rank: np.stack([data[index][0].numpy() for index in of_rank]) for rank, of_rank in ids.items()}
        cause = wrong_samples(fed(trial, lambda rank, _, rows=rows: rows[rank // 2], step))
        assert cause is not None and cause.kind == kind and told in cause.text
    assert dealt_otherwise(trial, 1) == ""


def test_ranks_that_read_on_too_far_in_their_own_share_are_told_with_the_place(ran: Ran) -> None:
    trial = ran(case_of())
    data = build_dataset(trial.case.training, trial.case.model)
    order = sample_order(trial.case.training, len(data), 0)
    own = trial.case.training.global_batch // 2

    def reading_from(*begun: int) -> Trial:
        ids = {rank: order[rank::2][at : at + own] for rank, at in enumerate(begun)}
        rows = {rank: np.stack([data[index][0].numpy() for index in of_rank]) for rank, of_rank in ids.items()}
        return fed(trial, lambda rank, _: rows[rank])

    far = trial.case.training.steps * own + 1
    cause = wrong_samples(reading_from(far, far))
    told = f"continues at its share's sample {far} (counted from 0), requested 0"
    assert cause is not None and cause.kind == "data position" and f"each dp rank {told}" in cause.text
    cause = wrong_samples(reading_from(far, 0))
    assert cause is not None and cause.text == f"the data position is wrong: rank 0 {told}"
    assert begun_elsewhere(reading_from(far, far + 1), 1, [0, 1]) == ""
    assert begun_elsewhere(trial, 1, [0, 1]) == ""


def test_steps_that_run_further_ahead_each_are_told_with_what_is_drawn_besides(ran: Ran) -> None:
    trial = ran(case_of())
    data = build_dataset(trial.case.training, trial.case.model)

    def reading(*sources: int) -> str:
        """The steps whose samples the last steps train on."""
        steps = list(trial.case.steps)[-len(sources) :]
        changed = trial
        for step, source in zip(steps, sources, strict=True):
            ids = step_samples(trial.case.training, len(data), source)
            rows = np.stack([data[index][0].numpy() for index in ids])
            changed = fed(changed, lambda rank, _, rows=rows: rows[rank::2], step)
        return further_ahead(changed, steps[0])

    last = trial.case.training.steps
    assert reading(last, last + 2) == f", and 2 in step {last}, as if each step drew one more batch"
    assert reading(last + 1, last + 4) == f", and 4 in step {last}, as if each step drew 2 more batches"
    assert reading(last, last + 1) == reading(last - 2, last - 1) == reading(last) == ""


# ---- one row, and one sample of eight tokens and its last label

SAMPLE = np.arange(10, 19)


def said(row: Sequence[int], wanted: int = 8) -> list[str]:
    return list(of_sample(np.array(row), SAMPLE, wanted))


def test_a_row_that_ends_too_early_is_told_with_its_length() -> None:
    assert said([*SAMPLE[:6]]) == ["the first 6 tokens of the step's samples, of 8"]


def test_a_row_that_begins_too_late_is_told_by_its_end_where_it_has_that() -> None:
    assert said([*SAMPLE[2:]]) == [f"the last {len(SAMPLE) - 2} tokens of the step's samples"]
    assert said([*SAMPLE[1:]]) == ["the step's samples from token 1 on (counted from 0)"]


def test_of_a_row_that_is_as_it_should_be_nothing_is_told() -> None:
    assert said([*SAMPLE[:8]]) == []


def test_a_row_that_goes_on_otherwise_is_not_one_that_ends() -> None:
    assert said([*SAMPLE[:5], 99]) == ["the first 5 tokens of the step's samples, then 99 only"]
    assert said([*SAMPLE[:5], 98, 99]) == []


def test_four_tokens_tell_a_part_and_three_do_not() -> None:
    assert said([*SAMPLE[5:], 1, 1, 1, 1]) == ["the step's samples from token 5 on (counted from 0)"]
    assert said([*SAMPLE[6:], 1, 1, 1, 1, 1]) == []
    assert said([*SAMPLE[:4], 1, 1]) == ["the first 4 tokens of the step's samples, then 1 only"]
    assert said([*SAMPLE[:3], 1, 1]) == []


def test_rows_of_the_samples_are_not_unknown_in_steps_of_any_length(ran: Ran) -> None:
    trial = ran(case_of(training=replace(RECIPE, variable_length=True)))
    assert [described(trial, step, [0, 1]) for step in trial.case.steps] == ["", "", ""]


def test_rows_that_end_too_early_are_told_with_the_length_of_the_step(ran: Ran) -> None:
    trial = ran(case_of())
    told = "the first 6 tokens of the step's samples, of 8"
    assert described(fed(trial, lambda rank, rows: rows[:, :6]), 1, [0, 1]) == told
