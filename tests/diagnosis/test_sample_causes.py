"""Samples, labels, documents and positions that ranks should not have received, named. Literal evidence, no ranks."""

# ruff: noqa: E501 - what is shown is asserted as it is shown

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from diagnosed import (
    diagnosis_text,
    expect,
    expect_first,
    first_line,
    fsdp_4,
    kinds,
    received,
    reference_gradient,
    with_scaled_samples,
)
from literal import (
    EIGHT,
    judged,
    tiny_case,
    trial_of,
    with_step,
    with_step_1_gradients,
)
from literal_ranks import microbatch_of

from harness.diagnosis import data
from harness.diagnosis.data import other_samples
from harness.diagnosis.positions import wrong_positions
from harness.diagnosis.received import seen_labels
from harness.diagnosis.words import groups_text
from harness.evidence.step import Microbatch
from harness.judge.losses import global_loss
from harness.judge.received_samples import received_samples
from harness.judge.result import Lines
from harness.judge.trial import Trial
from harness.plan.stages import positions
from harness.report.cause_text import cause_line
from harness.spec.dims import ParallelDims

# ---- data


def test_ranks_fed_the_same_samples_although_loss_and_gradients_are_wrong_too() -> None:
    trial = with_scaled_samples(fsdp_4(), {id_: 4.0 if id_ < 2 else 0.0 for id_ in range(8)})
    for rank in range(4):
        trial = received(trial, rank, 1, [0, 1])
    assert kinds(trial) == ("same samples", "averaged locally")


def test_two_of_four_ranks_fed_the_same_samples() -> None:
    expect_first(
        received(fsdp_4(), 3, 1, [4, 5]),
        """ranks [2,3] received the same samples, dp ranks must partition the global batch""",
    )


def test_overlapping_samples() -> None:
    expect(
        received(fsdp_4(), 3, 1, [5, 6]),
        """\
dp ranks draw overlapping samples: some are received more than once
  assuming this: 0 of 1 failing checks pass, and no passing check fails; taken as given: samples
  samples: step 1, samples: expected each of 8 samples received by one dp rank, observed 1 received more than once (5); 1 received by no rank (7)
  still failing: the loss of step 1 is off by 9.7e-02, its gradients match within the bound of 2.5e-14
  tried: 2 hypotheses, none explains the rest
  loss: step 1, loss: expected 2.53460829689014, observed 2.781272991204308 (off by 9.73e-02; bound 1.4e-14)
  gradients: equal to the reference exactly""",
    )


def test_samples_of_another_step() -> None:
    trial = fsdp_4()
    for rank in range(4):
        trial = received(trial, rank, 2, [2 * rank, 2 * rank + 1])
    expect_first(trial, """step 2 trains on samples of step 1: the data are 1 step behind""")


def test_samples_fed_to_nobody() -> None:
    expect_first(received(fsdp_4(), 3, 1, [6]), """1 of 8 samples are received by no rank""")


def test_tokens_of_no_sample() -> None:
    trial = fsdp_4()
    batch = trial.ranks[2].steps[0].microbatches[0]
    trial = with_step(trial, 2, 1, microbatches=(replace(batch, tokens=batch.tokens + 50),))
    expect_first(trial, """rows received on rank 2 are none of the recipe's 3 steps""")


def test_ranks_that_each_shuffle_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = fsdp_4()
    known, strange = trial.ranks[1].steps[0].microbatches[0], trial.ranks[2].steps[0].microbatches[0]
    trial = with_step(trial, 3, 2, microbatches=(known,))
    trial = with_step(trial, 3, 1, microbatches=(replace(strange, tokens=strange.tokens + 50),))
    expect_first(
        trial,
        """dp ranks draw overlapping samples, each in its own order; rows received on rank 3 are none of the recipe's 3 steps""",
    )
    monkeypatch.setattr(data, "described", lambda trial, step, ranks: f"what of {ranks} is known")
    assert first_line(trial).endswith("none of the recipe's 3 steps: what of [3] is known")


def test_tp_peers_fed_different_samples() -> None:
    trial = trial_of(tiny_case("fsdp_2_tp_2"))
    expect_first(received(trial, 1, 1, [4, 5, 6, 7]), """tp peers receive different samples: rank 1 unlike rank 0""")


def test_of_what_follows_from_different_samples_of_tp_peers_nothing_is_said_but_that_it_was_not_tested() -> None:
    trial = received(trial_of(tiny_case("fsdp_2_tp_2")), 1, 1, [4, 5, 6, 7])
    text = diagnosis_text(with_step_1_gradients(trial, lambda _, fqn: 1 + reference_gradient(trial, fqn) ** 2))
    why = "tp peers compute parts of different samples, and no reference tells what follows"
    assert f"not tested: whether all wrong numbers follow from this: {why}" in text
    assert "not explained" not in text and "still failing" not in text and "tried" not in text


def test_labels_of_another_sample() -> None:
    trial = fsdp_4()
    for rank in range(4):
        batch = trial.ranks[rank].steps[0].microbatches[0]
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, labels=batch.labels[::-1]),))
    told = "tokens and labels of different samples are paired: row 1 of tokens has the labels of row 2 in step 1"
    assert first_line(trial) == told
    one_row_right = trial.ranks[0].steps[0].microbatches[0]
    labels = one_row_right.labels.copy()
    labels[0] = labels[1]
    half = with_step(trial, 0, 1, microbatches=(replace(one_row_right, labels=labels),))
    assert "are paired" not in first_line(half)


@pytest.mark.parametrize("above", [True, False])
def test_a_part_of_the_vocabulary_whose_labels_are_masked_is_told(above: bool) -> None:
    trial = fsdp_4()
    every = np.concatenate([e.steps[0].microbatches[0].labels.ravel() for e in trial.ranks.values()])
    edge = int(np.unique(every[every >= 0])[1])
    for rank in range(4):
        (batch,) = trial.ranks[rank].steps[0].microbatches
        beyond = batch.labels >= edge if above else batch.labels <= edge
        masked = replace(batch, labels=np.where(beyond, -100, batch.labels))
        trial = with_step(trial, rank, 1, microbatches=(masked,))
    which = f"all {'from' if above else 'up to'} token {edge}{' on' if above else ''} are masked"
    assert f"labels of step 1 are not the samples': {which}" in first_line(trial)


@pytest.mark.parametrize("side", ["late", "early"])
def test_a_mask_of_labels_one_position_beside_its_place_is_told_with_the_side(side: str) -> None:
    right = trial = fsdp_4()
    for rank in range(4):
        (batch,) = right.ranks[rank].steps[0].microbatches
        masked, places = batch.labels < 0, np.arange(batch.labels.shape[1])
        beside = masked[:, np.maximum(places - 1, 0) if side == "late" else np.minimum(places + 1, places[-1])]
        moved = np.where(beside, -100, np.where(masked, 3, batch.labels))
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, labels=moved),))
    assert first_line(trial).endswith(f"are not the samples': the mask is one position {side}")


@pytest.mark.parametrize("masked", [True, False])
def test_a_mask_of_labels_that_is_too_wide_or_too_narrow(masked: bool) -> None:
    trial = fsdp_4()
    (batch,) = trial.ranks[2].steps[0].microbatches
    row, place = np.argwhere((batch.labels != -100) == masked)[0]
    labels = batch.labels.copy()
    labels[row, place] = -100 if masked else 3
    found = first_line(with_step(trial, 2, 1, microbatches=(replace(batch, labels=labels),)))
    how = "masked, but should be trained on" if masked else "trained on, but should be masked"
    told = "tokens are right, 1 label of step 1 is not the samples'"
    assert found == f"wrong labels on rank 2: {told}: {how}"


def test_labels_of_fewer_positions_are_known_by_their_shift_though_as_many_count() -> None:
    own = np.array([[1, 2, -100, 3, 4, 5, 6, 7], [8, 9, 1, -100, 2, 3, 4, 5]])
    shifted = Microbatch(tokens=own, labels=own[:, 1:], loss_sum=1.0, valid_tokens=12)
    assert seen_labels(shifted, own).tolist() == [[*row[1:], -100] for row in own.tolist()]
    counted = replace(shifted, labels=own[own >= 0])
    assert seen_labels(counted, own).tolist() == own.tolist()


def test_accumulation_left_out() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            ids = trial.reference.samples[step.step - 1][4 * rank : 4 * rank + 4]
            trial = received(trial, rank, step.step, list(ids))
    expect_first(trial, """accumulation: rank 0 ran microbatches of [4] samples in step 1, requested [2, 2]""")


# ---- documents, ranks without a valid token


def test_a_mean_over_no_valid_token() -> None:
    trial = fsdp_4()
    labels, received = trial.reference.labels.copy(), received_samples(trial, 1)[3]
    labels[[trial.reference.sample_ids.index(i) for i in received if i is not None]] = -100
    trial = replace(trial, reference=replace(trial.reference, labels=labels))
    (batch,) = trial.ranks[3].steps[0].microbatches
    silent = replace(batch, labels=np.full_like(batch.labels, -100), loss_sum=0.0, valid_tokens=0)
    trial = with_step(trial, 3, 1, microbatches=(silent,))
    trial = with_step_1_gradients(trial, lambda rank, fqn: trial.reference.steps[0].gradients[fqn] * np.nan)
    assert first_line(trial).endswith("rank 3 has no valid token, and a mean over none is 0/0"), first_line(trial)


# ---- samples and positions


def test_what_is_fed_wrongly_in_a_later_step_is_told_with_the_step() -> None:
    assert first_line(received(fsdp_4(), 3, 3, [21, 22])) == (
        "dp ranks draw overlapping samples in step 3: some are received more than once"
    )


def test_a_step_of_another_length_is_looked_for_at_its_own_positions() -> None:
    case = tiny_case(ParallelDims(cp=2), replace(EIGHT, variable_length=True), cp_load_balance=False)
    trial = trial_of(case)
    full = np.arange(4, 8)
    trial = with_step(trial, 1, 2, positions=(full,))
    assert judged("positions", trial).verdict == "FAIL"
    found = wrong_positions(trial)
    assert (
        found is not None
        and cause_line(found) == "wrong rotary positions: rank 1 receives positions 4-7 for its tokens at 2-3"
    )


def test_three_groups_are_shown_and_of_more_the_first_two_and_the_last() -> None:
    groups = [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert groups_text(groups[:3]) == "[0,1] [2,3] [4,5]"
    assert groups_text(groups) == "[0,1] [2,3] .. [6,7]"


# ---- samples


def test_tokens_of_no_sample_on_all_ranks_are_told_with_nothing_that_was_not_tested() -> None:
    trial = fsdp_4()
    for rank in trial.ranks:
        (batch,) = trial.ranks[rank].steps[0].microbatches
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, tokens=5 + (batch.tokens + rank) % 3),))
    assert first_line(trial) == "rows received on all ranks are none of the recipe's 3 steps"
    alone = with_step(fsdp_4(), 2, 1, microbatches=trial.ranks[2].steps[0].microbatches)
    assert first_line(alone).startswith("rows received on rank 2 are none of")


def test_accumulation_left_out_of_one_step_is_told_with_it() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    ids = trial.reference.samples[1]
    for rank in (0, 1):
        trial = received(trial, rank, 2, list(ids[4 * rank : 4 * rank + 4]))
    assert first_line(trial) == "accumulation: rank 0 ran microbatches of [4] samples in step 2, requested [2, 2]"


def test_a_rank_that_receives_a_sample_twice_is_named() -> None:
    assert first_line(received(fsdp_4(), 3, 1, [6, 6])) == "rank 3 receives a sample twice"
    assert first_line(received(fsdp_4(), 3, 2, [14, 14])) == "rank 3 receives a sample twice in step 2"


def fed(trial: Trial, rank: int, step: int, *microbatches: list[int]) -> Trial:
    parts = tuple(microbatch_of(trial.reference, ids) for ids in microbatches)
    return with_step(trial, rank, step, microbatches=parts)


def test_microbatches_that_are_an_earlier_one_again_are_named() -> None:
    right = trial = trial_of(tiny_case("ddp_2", accumulation=2))
    for step in (1, 2, 3):
        for rank in (0, 1):
            own = [8 * step - 8 + 4 * rank, 8 * step - 7 + 4 * rank]
            trial = fed(trial, rank, step, own, own[::-1])
    told = "in each step microbatches 1-2 have the same tokens on every rank, 4 of 8 samples are received by no rank"
    assert first_line(trial) == told
    told = "in step 2 microbatches 1-2 have the same tokens on rank 1, 2 of 8 samples are received by no rank"
    assert first_line(fed(right, 1, 2, [12, 13], [12, 13])) == told


def test_tokens_of_another_microbatch_are_told_by_their_labels() -> None:
    trial = trial_of(tiny_case("single", accumulation=2))
    for record in trial.ranks[0].steps:
        first, second = record.microbatches
        trial = with_step(trial, 0, record.step, microbatches=(replace(first, tokens=second.tokens), second))
    told = (
        "in each step microbatch 1 has the tokens of microbatch 2, and labels of its own on every rank, 4 of 8 samples"
    )
    assert first_line(trial).startswith(told)


def test_a_microbatch_that_goes_through_the_model_again_without_a_loss_is_a_pass_besides_training() -> None:
    trial = trial_of(tiny_case("single"))
    for record in trial.ranks[0].steps:
        (own,) = record.microbatches
        again = replace(own, loss_sum=None, labels=None, valid_tokens=None)
        trial = with_step(trial, 0, record.step, microbatches=(own, again))
    assert first_line(trial) == (
        "the model runs outside training passes: in each step microbatches 1-2 have the same tokens on every rank,"
        " no loss for microbatch 2"
    )


def test_several_microbatches_that_are_earlier_ones_again_are_named_together() -> None:
    trial = trial_of(tiny_case("single", accumulation=4))
    told = "in step 1 microbatches 1-4 have the same tokens on every rank, 6 of 8 samples are received by no rank"
    assert first_line(fed(trial, 0, 1, *[[0, 1]] * 4)) == told
    told = "in step 1 microbatches 1-2 have the same tokens, and microbatches 3-4 have the same tokens on every rank"
    assert first_line(fed(trial, 0, 1, [0, 1], [0, 1], [2, 3], [2, 3])).startswith(told)
    more = fed(trial, 0, 1, [0, 1], [2, 3], [4, 5], [6, 7], [0, 1])
    assert first_line(more) == "in step 1 microbatches 1 and 5 have the same tokens on every rank"


def test_a_sample_twice_in_other_microbatches_is_no_microbatch_again() -> None:
    trial = trial_of(tiny_case("ddp_2", accumulation=2))
    assert first_line(fed(trial, 1, 1, [4, 5], [4, 6])) == "rank 1 receives a sample twice"


def test_some_samples_of_another_step_are_counted() -> None:
    assert (
        first_line(received(fsdp_4(), 3, 1, [6, 9]))
        == "1 of 8 samples received in step 1 are those of step 2 on rank 3"
    )


def test_a_label_of_token_0_is_not_taken_for_a_masked_one() -> None:
    trial = fsdp_4()
    (batch,) = trial.ranks[2].steps[0].microbatches
    row, place = np.argwhere(batch.labels > 0)[0]
    labels = batch.labels.copy()
    labels[row, place] = 0
    found = first_line(with_step(trial, 2, 1, microbatches=(replace(batch, labels=labels),)))
    assert found == "wrong labels on rank 2: tokens are right, 1 label of step 1 is not the samples'"


def test_what_is_lost_is_lost_from_the_divisor_as_well_or_for_one_choice_more_is_not() -> None:
    trial = received(fsdp_4(), 3, 1, [6])
    own = {step: global_loss(trial, step) for step in trial.case.steps}
    valid = {rank: trial.ranks[rank].steps[0].microbatches[0].valid_tokens for rank in trial.ranks}
    share = sum(valid.values()) / trial.reference.steps[0].valid_tokens
    assert 0 < share < 1

    def supposed(reported: float) -> list[tuple[int, tuple[str, ...], Lines]]:
        shown = trial
        for rank, step, _ in list(trial.steps()):
            loss = own[step.step] * (reported if step.step == 1 else 1.0)
            shown = with_step(shown, rank, step.step, reported_loss=loss)
        results = {"samples": judged("samples", shown)}
        return [(one.fitted, one.seen, one.lines) for one in other_samples(shown, results)]

    found = judged("samples", trial).findings
    assert [(one.rank, one.step, one.observed) for one in found[:2]] == [
        (None, 1, "1 received by no rank (7)"),
        (3, 1, (1,)),
    ]
    lines = tuple(("samples", one) for one in found[:2])
    assert supposed(1.0) == [(1, ("samples", "positions"), lines), (2, (), lines)]
    assert supposed(share) == [(1, ("samples", "reported_loss", "positions"), lines), (2, (), lines)]


def test_positions_are_not_of_what_wrong_samples_have_seen_where_they_are_wrong_by_themselves() -> None:
    case = tiny_case(ParallelDims(cp=2), EIGHT, cp_load_balance=False)
    right = received_over_cp(trial_of(case), [0, 1, 2, 3, 4, 5, 6, 6])

    def seen(trial: Trial) -> tuple[str, ...]:
        return next(other_samples(trial, {"samples": judged("samples", trial)})).seen

    assert seen(right) == ("samples", "positions")
    assert seen(with_step(right, 1, 2, positions=(np.arange(4),))) == ("samples",)


def received_over_cp(trial: Trial, ids: list[int]) -> Trial:
    for rank in trial.ranks:
        part = microbatch_of(trial.reference, ids, positions(trial.case, rank, trial.case.seq_len(1)), 2)
        trial = with_step(trial, rank, 1, microbatches=(part,))
    return trial


def test_what_other_samples_are_assumed_to_be_costs_as_many_choices_as_were_made() -> None:
    def supposed(trial: Trial) -> list[tuple[str, int, bool]]:
        found = other_samples(trial, {"samples": judged("samples", trial)})
        return [(one.cause.kind, one.fitted, one.assume is not None) for one in found]

    over_tp = received(trial_of(tiny_case("fsdp_2_tp_2")), 1, 1, [4, 5, 6, 7])
    assert supposed(over_tp) == [("peers differ", 1, False)]
    whole, balanced = (trial_of(tiny_case(ParallelDims(cp=2), EIGHT, cp_load_balance=by)) for by in (False, True))
    assert supposed(replace(whole, case=balanced.case)) == [("another load balance", 2, True)]
    for rank, step, _ in list(whole.steps()):
        part = microbatch_of(whole.reference, whole.reference.samples[step.step - 1])
        whole = with_step(whole, rank, step.step, microbatches=(part,))
    assert supposed(whole) == [("CP not applied", 1, True)]
