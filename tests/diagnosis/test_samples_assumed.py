"""On what the reference is assumed to be trained where ranks received other samples, and what some of these are called."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from diagnosed import broken, fsdp_4, received
from literal import EIGHT, judged, tiny_case, trial_of, with_step, without_step
from literal_ranks import microbatch_of

from harness.diagnosis import data
from harness.diagnosis.data import _divided_by_all, other_samples, wrong_samples
from harness.diagnosis.hypothesis import Hypothesis
from harness.diagnosis.received import Rows
from harness.judge.finding import Finding
from harness.judge.losses import global_loss
from harness.judge.result import Cause
from harness.judge.trial import Trial
from harness.plan.stages import positions
from harness.reference.data import STEPS_PER_EPOCH
from harness.report.cause_text import cause_line
from harness.spec.case import Saved
from harness.spec.dims import ParallelDims

Trained = list[tuple[Trial, dict[int, Rows], dict[int, float]]]


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> Trained:
    """What `trained_on` is asked for."""
    asked: Trained = []

    def trained_on(trial: Trial, by_step: dict[int, Rows], counted: dict[int, float] | None = None) -> Trial:
        asked.append((trial, by_step, counted or {}))
        return trial

    monkeypatch.setattr(data, "trained_on", trained_on)
    return asked


def proposed(trial: Trial) -> list[Hypothesis]:
    return list(other_samples(trial, {"samples": judged("samples", trial)}))


def assumed(one: Hypothesis, trial: Trial) -> Trial:
    assert one.assume is not None
    return one.assume(trial)


def rows_of(trial: Trial, ids: list[int]) -> list[list[int]]:
    return trial.reference.tokens[ids].tolist()


# ---- what is assumed


def test_the_reference_is_trained_on_the_rows_that_all_ranks_received(trained: Trained) -> None:
    trial = received(fsdp_4(), 3, 2, [14, 1])
    (one,) = [one for one in proposed(trial) if one.fitted == 1]
    assumed(one, trial)
    ((of, by_step, counted),) = trained
    assert of is trial and counted == {} and [*by_step] == [1, 2, 3]
    assert sorted(by_step[2].tokens.tolist()) == sorted(rows_of(trial, [8, 9, 10, 11, 12, 13, 14, 1]))


def test_labels_that_are_lost_may_still_be_counted_in_the_divisor(trained: Trained) -> None:
    """The label of token 0 is one as well."""
    trial = fsdp_4()
    (part,) = trial.ranks[2].steps[0].microbatches
    assert part.labels is not None
    labels = part.labels.copy()
    labels[labels >= 0] = 0
    trial = with_step(trial, 2, 1, microbatches=(replace(part, labels=labels),))
    assert [one.fitted for one in proposed(trial)] == [1], "as many as are requested"
    trial = received(trial, 3, 1, [6])
    once, still = proposed(trial)
    assert (once.fitted, still.fitted) == (1, 2)
    assumed(still, trial)
    ((of, by_step, counted),) = trained
    assert of is trial and sorted(by_step[1].tokens.tolist()) == sorted(rows_of(trial, [*range(7)]))
    left = sum((trial.reference.labels[[*range(7)]] >= 0).sum(axis=1))
    assert counted == {1: left / trial.reference.steps[0].valid_tokens, 2: 1.0, 3: 1.0}


def test_of_a_step_whose_rows_are_not_known_nothing_is_assumed(trained: Trained) -> None:
    trial = received(fsdp_4(), 3, 2, [14, 1])
    (part,) = trial.ranks[0].steps[2].microbatches
    (one,) = proposed(with_step(trial, 0, 3, microbatches=(replace(part, tokens=None),)))
    assert (one.assume, one.fitted, one.seen) == (None, 1, ("samples", "positions"))


def over_cp(balanced: bool) -> Trial:
    return trial_of(tiny_case(ParallelDims(cp=2), EIGHT, cp_load_balance=balanced))


def whole_sequences(steps: tuple[int, ...] = (1, 2, 3), *, variable: bool = False) -> Trial:
    case = tiny_case(ParallelDims(cp=2), replace(EIGHT, variable_length=variable), cp_load_balance=False)
    trial = trial_of(case)
    for rank, step, _ in list(trial.steps()):
        if step.step in steps:
            at = np.arange(trial.case.seq_len(step.step))
            part = microbatch_of(trial.reference, trial.reference.samples[step.step - 1], at)
            trial = with_step(trial, rank, step.step, microbatches=(part,))
    return trial


def test_where_cp_is_not_applied_its_ranks_are_data_parallel_ones_that_receive_the_same(trained: Trained) -> None:
    trial = whole_sequences()
    (one,) = proposed(trial)
    assumed(one, trial)
    ((of, by_step, counted),) = trained
    assert (of.case.dims.cp, of.case.dims.dp_shard, of.case.training.global_batch, counted) == (1, 2, 16, {})
    assert of.plan.groups.keys() == {"dp_shard"}
    assert [*by_step] == [1, 2, 3]
    for step, rows in by_step.items():
        assert sorted(rows.tokens.tolist()) == sorted(2 * rows_of(trial, list(trial.reference.samples[step - 1])))


@pytest.mark.parametrize("balanced", [True, False])
def test_another_load_balance_is_requested_instead(balanced: bool) -> None:
    trial, other = over_cp(balanced), over_cp(not balanced)
    wrong = replace(trial, case=other.case)
    (one,) = proposed(wrong)
    assert one.cause.observed == f"cp_load_balance {not balanced} is requested, {balanced} is observed"
    assert (one.fitted, one.seen) == (2, ("samples", "positions"))
    assert assumed(one, wrong).case == trial.case


def test_the_first_two_findings_are_shown() -> None:
    trial = received(fsdp_4(), 3, 1, [5, 6])
    check = broken("samples")
    found = tuple(Finding.at(rank, None, text) for rank, text in enumerate(("one", "two", "three")))
    (one, *_) = other_samples(trial, {"samples": replace(check["samples"], findings=found)})
    assert one.lines == (("samples", found[0]), ("samples", found[1]))


def test_a_loss_is_reported_as_a_mean_over_all_that_were_requested_within_its_bound() -> None:
    trial = received(fsdp_4(), 3, 1, [6])
    means = {step: 0.5 * (global_loss(trial, step) or 0.0) for step in trial.case.steps}

    def shown(off: float) -> bool:
        changed = trial
        for rank, step, _ in list(trial.steps()):
            changed = with_step(changed, rank, step.step, reported_loss=means[step.step] * (1 + off))
        return _divided_by_all(changed, dict.fromkeys(trial.case.steps, 0.5))

    bound = trial.bounds.loss[1]
    assert bound < 1e-9 and shown(0.0) and shown(0.5 * bound) and not shown(10 * bound)
    assert not _divided_by_all(trial, {})


# ---- what they are called


def test_samples_that_are_right_have_no_cause() -> None:
    assert wrong_samples(fsdp_4()) is None and wrong_samples(over_cp(True)) is None


@pytest.mark.parametrize(("steps", "when"), [((1, 2, 3), ""), ((2, 3), " in step 2")])
@pytest.mark.parametrize("variable", [False, True])
def test_whole_sequences_are_those_of_each_step_s_length(steps: tuple[int, ...], when: str, variable: bool) -> None:
    assert wrong_samples(whole_sequences(steps, variable=variable)) == Cause(
        "CP not applied", f"CP not applied: every cp rank receives whole sequences{when}", expected="cp 2"
    )


def cut(trial: Trial, rank: int, at: list[int]) -> Trial:
    part = microbatch_of(trial.reference, trial.reference.samples[0], np.array(at), 2)
    return with_step(trial, rank, 1, microbatches=(part,))


def test_sequences_that_are_cut_otherwise_are_told_by_what_all_ranks_receive() -> None:
    right = over_cp(False)
    assert wrong_samples(cut(right, 1, [0, 1, 2, 3])) == Cause(
        "sequence not divided over cp",
        "the sequence is not divided over cp: every rank receives the tokens at 0-3",
    )
    assert wrong_samples(cut(right, 1, [2, 3, 4, 5])) == Cause(
        "sequence cut otherwise",
        "cp ranks receive the wrong part of the sequence",
        hint="rank 1 receives the tokens at 2-5, expected 4-7",
    )
    balanced = cut(right, 0, [0, 1, 6, 7])
    found = wrong_samples(cut(balanced, 1, [2, 3, 4, 5]))
    assert found is not None and found.kind == "another load balance"
    assert wrong_samples(cut(right, 1, [*range(8)])) == Cause(
        "sequence cut otherwise",
        "cp ranks receive the wrong part of the sequence",
        hint="rank 1 receives the tokens at 0-7, expected 4-7",
    )


def test_a_load_balance_is_told_in_a_step_of_another_length() -> None:
    balanced, plain = (
        tiny_case(ParallelDims(cp=2), replace(EIGHT, variable_length=True), cp_load_balance=by) for by in (True, False)
    )
    trial = trial_of(plain)
    for rank in (0, 1):
        at = positions(balanced, rank, plain.seq_len(2))
        part = microbatch_of(trial.reference, trial.reference.samples[1], at, 2)
        trial = with_step(trial, rank, 2, microbatches=(part,))
    found = wrong_samples(trial)
    assert found is not None and plain.seq_len(2) < 8
    assert found.observed == "cp_load_balance False is requested, True is observed"
    assert found.hint == "rank 0 receives the tokens at 0 and 3 in step 2, expected 0-1"


def resumed(**changes: Any) -> Trial:
    return trial_of(tiny_case(ParallelDims(dp_shard=4), resume=(Saved(1, ParallelDims()),), **changes))


@pytest.mark.parametrize(
    ("of", "told"),
    [
        (1, "the data position restarts after resuming: step 2 receives the samples of step 1"),
        (3, "the data position is wrong after resuming: step 2 receives the samples of step 3"),
    ],
)
def test_data_of_another_step_after_resuming_have_another_position(of: int, told: str) -> None:
    right = trial = resumed()
    ids = trial.reference.samples[of - 1]
    for rank in trial.ranks:
        trial = received(trial, rank, 2, list(ids[2 * rank : 2 * rank + 2]))
    assert wrong_samples(trial) == Cause("data position", told)
    found = wrong_samples(received(right, 3, 2, [14, 1]))
    assert found is not None and found.kind == "data position"
    assert cause_line(found).endswith("is wrong after resuming: step 2 receives samples of other steps on rank 3")
    assert wrong_samples(received(right, 3, 2, [12, 13])) == Cause(
        "same samples",
        "ranks [2,3] received the same samples after resuming, dp ranks must partition the global batch",
    )


def test_a_rank_that_left_no_step_shares_no_rows() -> None:
    trial = received(fsdp_4(), 3, 1, [14, 1])
    assert data._share_rows(without_step(trial, 3, 1)) is False
    assert data._share_rows(trial) is True, "samples of other steps, which other ranks receive"
    assert STEPS_PER_EPOCH > 1
