"""The checks of data: initial_weights and samples. Literal evidence, no ranks."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from checked import EMBEDDING, NORM, findings, like
from literal import last_bit, tiny_case, trial_of, with_parameter, with_step
from literal_ranks import microbatch_of

# ---- initial_weights


def test_weights_that_are_not_the_seeds_are_named_and_their_elements_missed() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, NORM, value=np.ones(2))
    assert findings("initial_weights", trial) == (
        like(1, "a slice of the seed weight", "other values", name=NORM),
        like((), 4, 2, name=NORM, unit="elements", quantity="held by some rank"),
    )


def test_weights_off_by_their_last_bit_on_one_replica_are_named() -> None:
    trial = trial_of(tiny_case("hsdp_2x2"))
    trial = with_parameter(trial, 3, NORM, value=last_bit(trial.ranks[3].parameters[-2].value))
    assert findings("initial_weights", trial) == (like(3, "a slice of the seed weight", "other values", name=NORM),)


def test_rows_that_nobody_holds_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    trial = with_parameter(trial, 1, EMBEDDING, value=trial.ranks[0].parameters[0].value)
    assert findings("initial_weights", trial) == (
        like((), 32, 16, name=EMBEDDING, unit="elements", quantity="held by some rank"),
    )


# ---- samples


def feeding(trial, rank: int, step: int, *ids: list[int]):
    """The trial with a rank received these samples, one list a microbatch."""
    microbatches = tuple(microbatch_of(trial.reference, part) for part in ids)
    return with_step(trial, rank, step, microbatches=microbatches)


def test_two_ranks_fed_the_same_samples_are_named() -> None:
    assert findings("samples", feeding(trial_of(tiny_case("ddp_2")), 1, 1, [0, 1, 2, 3])) == (
        like(
            (0, 1),
            "each of 8 samples received by one dp rank",
            "4 received more than once (0, 1, 2, 3); 4 received by no rank (4, 5, 6, 7)",
            step=1,
            note="ranks [0,1] received the same",
            quantity="samples",
        ),
    )


def test_ranks_fed_with_rows_that_are_no_samples_are_not_said_to_receive_the_same() -> None:
    trial = trial_of(tiny_case("ddp_2"))
    for rank, token in ((0, 1), (1, 2)):
        (batch,) = trial.ranks[rank].steps[0].microbatches
        trial = with_step(trial, rank, 1, microbatches=(replace(batch, tokens=np.full_like(batch.tokens, token)),))
    (first, *_) = findings("samples", trial)
    assert first.observed == "8 received by no rank (0, 1, 2, 3, ...)"


def test_a_tp_peer_fed_other_samples_is_named() -> None:
    trial = feeding(trial_of(tiny_case("fsdp_2_tp_2")), 3, 3, [20, 21, 22, 16])
    assert findings("samples", trial) == (
        like(
            3,
            (20, 21, 22, 23),
            (20, 21, 22, 16),
            step=3,
            note="expected: those of rank 2",
            quantity="samples",
            axis="tp",
            group=(2, 3),
        ),
    )


def test_samples_that_only_a_tp_peer_receives_are_not_said_to_be_received_by_no_rank() -> None:
    """Shares dealt out by global rank, although tp is the innermost axis: ranks 0 to 3 have the shares 0, 1, 0, 1."""
    trial = feeding(trial_of(tiny_case("fsdp_2_tp_2")), 1, 1, [4, 5, 6, 7])
    trial = feeding(trial, 2, 1, [0, 1, 2, 3])
    of_step = next(one for one in findings("samples", trial) if one.ranks == (0, 2))
    twice = "4 received more than once (0, 1, 2, 3)"
    assert of_step.observed == f"{twice}; 4 received by some tp or cp peers only (4, 5, 6, 7)"


def test_samples_of_the_next_step_are_named() -> None:
    assert findings("samples", feeding(trial_of(tiny_case("single")), 0, 2, list(range(9, 17)))) == (
        like(
            (), "each of 8 samples received by one dp rank", "1 received by no rank (8); 1 of another step (16)", step=2
        ),
    )


def test_tokens_that_are_no_sample_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    (microbatch,) = trial.ranks[1].steps[2].microbatches
    shifted = replace(microbatch, tokens=np.roll(microbatch.tokens, 1, axis=1))
    shown = findings("samples", with_step(trial, 1, 3, microbatches=(shifted,)))
    assert sorted((finding.ranks, finding.step) for finding in shown) == [((), 3), ((1,), 3)]


def test_labels_that_are_not_shifted_are_counted() -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    (microbatch,) = trial.ranks[1].steps[2].microbatches
    labels = microbatch.labels.copy()
    labels[0, :2] = 99
    assert findings("samples", with_step(trial, 1, 3, microbatches=(replace(microbatch, labels=labels),))) == (
        like(1, 0, 2, step=3, quantity="labels that are not those of its tokens"),
    )


def test_accumulation_that_did_not_take_place_is_named() -> None:
    requested, ran = tiny_case("single", accumulation=2), tiny_case("single")
    assert findings("samples", trial_of(requested, ran)) == tuple(
        like(0, (4, 4), (8,), step=step, quantity="samples of each microbatch") for step in (1, 2, 3)
    )


def test_an_uneven_split_over_ranks_is_named() -> None:
    trial = feeding(trial_of(tiny_case("ddp_2")), 0, 1, [0, 1, 2, 3, 4])
    trial = feeding(trial, 1, 1, [5, 6, 7])
    assert findings("samples", trial) == (
        like(0, (4,), (5,), step=1, quantity="samples of each microbatch"),
        like(1, (4,), (3,), step=1, quantity="samples of each microbatch"),
    )


def test_a_sample_fed_twice_beside_all_the_others_is_named() -> None:
    assert findings("samples", feeding(trial_of(tiny_case("ddp_2")), 1, 1, [4, 5, 6, 7, 0])) == (
        like((), "each of 8 samples received by one dp rank", "1 received more than once (0)", step=1),
        like(1, (4,), (5,), step=1, quantity="samples of each microbatch"),
    )


def test_a_step_without_any_microbatch_does_not_pass() -> None:
    trial = with_step(trial_of(tiny_case("ddp_2")), 1, 2, microbatches=())
    assert findings("samples", trial)[-1] == like(1, (4,), (), step=2, quantity="samples of each microbatch")


# ---- replica_agreement


@pytest.mark.parametrize(
    "labels", [None, np.zeros(3, np.int64), np.zeros((8, 3), np.int64)], ids=["none", "few", "short"]
)
def test_labels_that_are_not_one_a_token_are_not_passed_over(labels: np.ndarray | None) -> None:
    trial = trial_of(tiny_case("single"))
    (microbatch,) = trial.ranks[0].steps[1].microbatches
    trial = with_step(trial, 0, 2, microbatches=(replace(microbatch, labels=labels),))
    labelled = 0 if labels is None else labels.size
    assert findings("samples", trial) == (like(0, (32,), (labelled,), step=2, quantity="labels of each microbatch"),)
