"""Rows of tokens that are no sample's are told by what they are of one. Literal rows, no ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
from literal import with_step, without_step
from trained import RECIPE, Ran, _ran, case_of  # noqa: F401

from harness.diagnosis import unknown_rows
from harness.diagnosis.data import wrong_samples
from harness.diagnosis.unknown_rows import begun_elsewhere, dealt_otherwise, described, further_ahead, of_sample
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.reference import data as reference_data
from harness.reference.data import build_dataset, sample_order, step_samples
from harness.report.cause_text import cause_line
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
        (lambda trial, rows: rows[:, :3], ""),
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
    assert (dealt_otherwise(trial, 1), further_ahead(trial, 1), begun_elsewhere(trial, 1, [0, 1])) == ("", "", "")


def test_of_pieces_of_samples_that_cp_ranks_receive_nothing_is_told(ran: Ran) -> None:
    trial = ran(case_of(ParallelDims(cp=2), cp_load_balance=False))
    assert [described(trial, 1, [rank]) for rank in (0, 1)] == ["", ""]
    assert (further_ahead(trial, 1), begun_elsewhere(trial, 1, [0, 1])) == ("", "")


def test_rows_of_several_kinds_are_told_by_none(ran: Ran) -> None:
    trial = ran(case_of())
    other = fed(trial, lambda rank, rows: following(trial, rows, 1 + rank))
    assert described(other, 1, [0, 1]) == "none of the data set's"


def drawing(trial: Trial, ids: dict[int, Sequence[int]], step: int = 1) -> Trial:
    """ids: by rank, the data set's samples that it receives; those without keep theirs."""
    data, length = build_dataset(trial.case.training, trial.case.model), trial.case.seq_len(step)
    rows = {rank: np.stack([data[index][0].numpy()[:length] for index in of_rank]) for rank, of_rank in ids.items()}
    return fed(trial, lambda rank, own: rows.get(rank, own), step)


def order_of(trial: Trial, epoch: int = 0) -> list[int]:
    return sample_order(trial.case.training, len(build_dataset(trial.case.training, trial.case.model)), epoch)


@pytest.mark.parametrize(
    ("epoch", "told"),
    [
        (1, "samples of the data set in the order of seed 1235, or of epoch 1 (counted from 0)"),
        (7, "samples of the data set in the order of seed 1241, or of epoch 7 (counted from 0)"),
        (8, "samples of the data set outside these steps"),
        (-1, "samples of the data set in the order of seed 1233"),
        (-8, "samples of the data set in the order of seed 1226"),
        (-9, "samples of the data set outside these steps"),
        (-RECIPE.seed, "samples of the data set in the order of seed 0"),
    ],
)
def test_ranks_that_shuffle_by_another_seed_are_told_with_it(ran: Ran, epoch: int, told: str) -> None:
    trial = ran(case_of())
    order = order_of(trial, epoch)
    assert described(drawing(trial, {rank: order[rank:8:2] for rank in (0, 1)}), 1, [0, 1]) == told
    cause = wrong_samples(drawing(trial, {1: order[1:8:2]}))
    assert cause is not None and cause.hint == told


def test_rows_of_no_step_are_told_with_the_ranks_that_receive_them(ran: Ran) -> None:
    trial = ran(case_of())
    told = "samples of the data set in the order of seed 1235, or of epoch 1 (counted from 0)"
    for share, where in ((0, "on rank 0"), (1, "on rank 1")):
        cause = wrong_samples(drawing(trial, {share: order_of(trial, 1)[share:8:2]}))
        text = f"rows received {where} are none of the recipe's 3 steps"
        assert cause == Cause("samples of no step", text, hint=told)


def test_of_a_step_of_shorter_sequences_as_many_tokens_of_each_sample_are_looked_up(ran: Ran) -> None:
    trial = ran(case_of(training=replace(RECIPE, seq_len=16, variable_length=True)))
    order = order_of(trial, 1)
    told = "samples of the data set in the order of seed 1235, or of epoch 1 (counted from 0)"
    assert described(drawing(trial, {rank: order[rank::2][4:8] for rank in (0, 1)}, 2), 2, [0, 1]) == told
    whole = {row[:8].tobytes(): row for row in trial.reference.tokens}
    uncut = fed(trial, lambda rank, rows: np.stack([whole[row.tobytes()] for row in rows]), 2)
    assert described(uncut, 2, [0, 1]) == "the first 16 tokens of the step's samples, of 8"


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
        assert cause is not None and cause.kind == kind and told in cause_line(cause)
    assert dealt_otherwise(trial, 1) == ""


@pytest.mark.parametrize(
    ("stride", "told"),
    [
        (1, ""),
        (2, "each dp rank reads every second of the shuffled samples, requested every 4th"),
        (4, ""),
        (
            8,
            "each dp rank reads every 8th of the shuffled samples (one share per rank of the world), "
            "requested every 4th",
        ),
        (16, ""),
    ],
)
def test_every_product_of_degrees_is_supposed_to_be_the_number_of_shares(ran: Ran, stride: int, told: str) -> None:
    trial = ran(case_of(ParallelDims(dp_replicate=2, dp_shard=2, tp=2)))
    order = order_of(trial)
    assert dealt_otherwise(drawing(trial, {rank: order[rank // 2 :: stride][:2] for rank in range(8)}), 1) == told


def test_a_share_is_counted_by_its_number() -> None:
    assert [unknown_rows._nth(number) for number in (2, 3, 4)] == ["second", "third", "4th"]


def test_tp_ranks_that_receive_different_samples_are_not_dealt_by_one_order(ran: Ran) -> None:
    trial = ran(case_of(ParallelDims(tp=2)))
    other, own = order_of(trial, 1)[:8], list(trial.reference.samples[0])
    assert described(drawing(trial, {0: other, 1: other}), 1, [0, 1]).endswith("of epoch 1 (counted from 0)")
    for ids in ({0: other, 1: own}, {0: own, 1: other}):
        assert described(drawing(trial, ids), 1, [0, 1]) == "samples of the data set outside these steps"


# ---- another place in the data


def reading_from(trial: Trial, begun: dict[int, int], step: int = 1) -> Trial:
    """Each of these ranks of two shares from this sample of its own on."""
    own, world, order = trial.case.training.global_batch // 2, trial.case.dims.world_size, order_of(trial)
    share = {rank: order[rank % world // (world // 2) :: 2] for rank in begun}
    return drawing(trial, {rank: share[rank][at : at + own] for rank, at in begun.items()}, step)


@pytest.mark.parametrize(
    ("dims", "begun", "told"),
    [
        (ParallelDims(dp_shard=2), {0: 13, 1: 13}, "each dp rank continues at its"),
        (ParallelDims(dp_shard=2), {0: 13}, "rank 0 continues at its"),
        (ParallelDims(dp_shard=2), {1: 13}, "rank 1 continues at its"),
        (ParallelDims(dp_shard=2, tp=2), {2: 13, 3: 13}, "ranks [2,3] continue at their"),
        (ParallelDims(dp_shard=2, tp=2), {0: 13, 1: 13, 2: 13, 3: 13}, "each dp rank continues at its"),
    ],
)
@pytest.mark.parametrize(("step", "when", "wanted"), [(1, "", 0), (2, " in step 2", 4)])
def test_ranks_that_read_on_too_far_in_their_own_share_are_told_with_the_place(
    ran: Ran, dims: ParallelDims, begun: dict[int, int], told: str, step: int, when: str, wanted: int
) -> None:
    trial = ran(case_of(dims))
    cause = wrong_samples(reading_from(trial, begun, step))
    place = f"{told} share's sample 13 (counted from 0), requested {wanted}"
    assert cause == Cause("data position", f"the data position is wrong{when}: {place}")


def test_ranks_that_receive_no_tokens_are_not_expected_to_read_on(ran: Ran) -> None:
    trial = ran(case_of(ParallelDims(dp_shard=2, tp=2)))
    trial = replace(trial, plan=replace(trial.plan, stages={0: (0,), 1: (1,), 2: (0,), 3: (1,)}))
    told = "each dp rank continues at its share's sample 13 (counted from 0), requested 0"
    assert begun_elsewhere(reading_from(trial, dict.fromkeys(range(4), 13)), 1, [0, 2]) == told


def test_ranks_that_read_on_at_several_places_or_at_none_have_no_place_in_common(ran: Ran) -> None:
    trial = ran(case_of())
    assert begun_elsewhere(reading_from(trial, {0: 13, 1: 14}), 1, [0, 1]) == ""
    assert begun_elsewhere(drawing(trial, {0: order_of(trial, 1)[:8:2]}), 1, [0]) == ""
    assert begun_elsewhere(drawing(reading_from(trial, {0: 13}), {1: order_of(trial, 1)[1:8:2]}), 1, [0, 1]) == ""


@pytest.mark.parametrize(
    ("sources", "told"),
    [
        ([3, 5], ", and 2 in step 3, as if each step drew one more batch"),
        ([4, 7], ", and 4 in step 3, as if each step drew 2 more batches"),
        ([6, 11], ", and 8 in step 3, as if each step drew 4 more batches"),
        ([7, 13], ""),  # that far ahead no step is looked up
        ([3, 6, 9], ", and 4 in step 2, as if each step drew 2 more batches"),
        ([3, 6, 8], ""),
        ([3, 4], ""),
        ([3, 200], ""),
        ([1, 2], ""),
        ([2, 3], ""),
        ([3], ""),
        ([4], ""),
    ],
)
def test_steps_that_run_further_ahead_each_are_told_with_what_is_drawn_besides(
    ran: Ran, sources: list[int], told: str
) -> None:
    """The last steps train on the samples of these."""
    trial = ran(case_of())
    size, first = len(order_of(trial)), trial.case.training.steps - len(sources) + 1
    for step, source in enumerate(sources, start=first):
        ids = step_samples(trial.case.training, size, source)
        trial = drawing(trial, {rank: ids[rank::2] for rank in (0, 1)}, step)
    assert further_ahead(trial, first) == told


def test_where_a_rank_has_no_later_step_none_is_told_to_run_further_ahead(ran: Ran) -> None:
    trial = ran(case_of())
    size = len(order_of(trial))
    for step, source in ((2, 3), (3, 5)):
        ids = step_samples(trial.case.training, size, source)
        trial = drawing(trial, {rank: ids[rank::2] for rank in (0, 1)}, step)
    assert further_ahead(trial, 2) != "" == further_ahead(without_step(trial, 1, 3), 2)


# ---- one row, and one sample of eight tokens and its last label

SAMPLE = np.arange(10, 19)


def said(row: Sequence[int], wanted: int = 8) -> list[str]:
    return list(of_sample(np.array(row), SAMPLE, wanted))


@pytest.mark.parametrize(
    ("row", "told"),
    [
        (SAMPLE[:8], []),  # as it should be
        (SAMPLE[:6], ["the first 6 tokens of the step's samples, of 8"]),
        (SAMPLE[:4], ["the first 4 tokens of the step's samples, of 8"]),
        (SAMPLE[:3], []),  # too few to be sure
        (SAMPLE, ["the first 9 tokens of the step's samples, of 8"]),
        ([*SAMPLE, 1, 1], ["the first 9 tokens of the step's samples, then 1 only"]),
        ([*SAMPLE[:5], 99], ["the first 5 tokens of the step's samples, then 99 only"]),
        ([*SAMPLE[:5], 98, 99], []),
        ([*SAMPLE[:4], 1, 1], ["the first 4 tokens of the step's samples, then 1 only"]),
        ([*SAMPLE[:3], 1, 1], []),
        (SAMPLE[1:], ["the step's samples from token 1 on (counted from 0)"]),
        (SAMPLE[1:8], ["the step's samples from token 1 on (counted from 0)"]),
        (SAMPLE[2:7], ["the step's samples from token 2 on (counted from 0)"]),
        (SAMPLE[2:8], ["the last 6 tokens of the step's samples"]),
        (SAMPLE[2:], ["the last 7 tokens of the step's samples"]),
        (SAMPLE[5:], ["the last 4 tokens of the step's samples"]),
        (SAMPLE[6:], []),
        ([*SAMPLE[5:], 1, 1, 1, 1], ["the step's samples from token 5 on (counted from 0)"]),
        ([*SAMPLE[6:], 1, 1, 1, 1, 1], []),
    ],
)
def test_a_row_is_told_by_the_part_of_a_sample_that_it_is(row: Sequence[int], told: list[str]) -> None:
    assert list(of_sample(np.array(row), SAMPLE, 8)) == told


def test_rows_of_the_samples_are_not_unknown_in_steps_of_any_length(ran: Ran) -> None:
    trial = ran(case_of(training=replace(RECIPE, variable_length=True)))
    assert [described(trial, step, [0, 1]) for step in trial.case.steps] == ["", "", ""]


def test_rows_that_end_too_early_are_told_with_the_length_of_the_step(ran: Ran) -> None:
    trial = ran(case_of())
    told = "the first 6 tokens of the step's samples, of 8"
    assert described(fed(trial, lambda rank, rows: rows[:, :6]), 1, [0, 1]) == told
