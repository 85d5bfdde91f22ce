"""The check of all other numbers that a rank reports, on literal evidence, and the meaning that explains a wrong one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from checked import findings
from diagnosed import kinds, proven
from literal import EIGHT, TINY, judged, tiny_case, trial_of, with_step

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.evidence.numbers import Number
from harness.core.judge.held_values import whole_weights_after
from harness.core.judge.norms import PARAMETERS, norm_of_slices
from harness.core.judge.numbers import ExpectedNumbers, NotOnRecord, mean_parts_of_rank
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial

STEPS = (1, 2, 3)
GRID = trial_of(tiny_case("hsdp_2x2"))
CP = trial_of(tiny_case(ParallelDims(dp_shard=2, cp=2), EIGHT))
RATE = {"of": "tokens", "rate": True, "seconds": 0.25}


def tokens(trial: Trial, step: int, ranks: Any = None) -> int:
    """Return the tokens that ranks received in a step; by default all ranks, which share none here."""
    every = trial.ranks if ranks is None else ranks
    return sum(part.tokens.size for rank in every for part in trial.ranks[rank].steps[step - 1].microbatches)


def valid(trial: Trial, step: int, ranks: Any = None) -> int:
    every = trial.ranks if ranks is None else ranks
    return sum(part.valid_tokens for rank in every for part in trial.ranks[rank].steps[step - 1].microbatches)


def reporting(trial: Trial, value: Any, **meaning: Any) -> Trial:
    """value: by rank and step."""
    for rank in trial.ranks:
        for step in STEPS:
            trial = with_step(trial, rank, step, numbers={"n": Number(value(rank, step), **meaning)})
    return trial


def test_a_trainer_that_reports_none_is_not_judged() -> None:
    assert judged("reported_numbers", GRID).verdict is Verdict.NOT_APPLICABLE


@pytest.mark.parametrize(
    ("meaning", "value"),
    [
        ({"of": "tokens"}, lambda rank, step: tokens(GRID, step)),
        ({"of": "tokens", "steps": None}, lambda rank, step: sum(tokens(GRID, one) for one in range(1, step + 1))),
        ({"of": "tokens", "over": ()}, lambda rank, step: tokens(GRID, step, [rank])),
        ({"of": "valid tokens"}, lambda rank, step: valid(GRID, step)),
        ({"of": "valid tokens", "over": ("dp_shard",)}, lambda rank, step: valid(GRID, step, [rank, rank ^ 1])),
        ({"of": "samples"}, lambda rank, step: GRID.case.training.global_batch),
        ({"of": "steps", "steps": None}, lambda rank, step: step),
        ({"of": "epochs", "steps": None}, lambda rank, step: step / 64),
        ({"of": "epoch", "steps": None}, lambda rank, step: 0),
        (RATE, lambda rank, step: tokens(GRID, step) / 0.25),
        ({**RATE, "divided_by": ("dp_replicate", "dp_shard")}, lambda rank, step: tokens(GRID, step)),
        ({**RATE, "times": 0.5}, lambda rank, step: 2 * tokens(GRID, step)),
    ],
)
def test_each_meaning_has_its_right_number_and_one_more_is_found(meaning: dict[str, Any], value: Any) -> None:
    result = judged("reported_numbers", reporting(GRID, value, **meaning))
    assert (result.verdict, result.examined) == (Verdict.PASS, 12)
    odd = reporting(GRID, lambda rank, step: value(rank, step) + ((rank, step) == (3, 2)), **meaning)
    (finding,) = findings("reported_numbers", odd)
    assert (finding.ranks, finding.step, finding.quantity) == ((3,), 2, "reported n")
    assert finding.observed == finding.expected + 1


def test_cp_ranks_receive_parts_of_the_same_samples() -> None:
    whole = CP.case.training.global_batch
    assert judged("reported_numbers", reporting(CP, lambda *_: whole, of="samples")).verdict is Verdict.PASS
    assert judged("reported_numbers", reporting(CP, lambda *_: 2 * whole, of="samples")).verdict is Verdict.FAIL


def test_a_rate_without_its_seconds_is_unknown() -> None:
    result = judged("reported_numbers", reporting(GRID, lambda *_: 1.0, of="tokens", rate=True))
    assert (result.verdict, result.note) == (Verdict.UNKNOWN, "n: it is a rate, and its seconds are not handed over")


def test_a_validation_of_which_nothing_was_seen_is_unknown() -> None:
    assert judged("reported_numbers", reporting(GRID, lambda *_: 1.0, of="validation loss")).verdict is Verdict.UNKNOWN


def test_what_is_no_number_is_found() -> None:
    assert len(findings("reported_numbers", reporting(GRID, lambda *_: float("nan"), of="tokens"))) == 12


def test_a_validation_that_is_requested_and_not_reported_is_found() -> None:
    (finding,) = findings("reported_numbers", trial_of(tiny_case("hsdp_2x2", validate_every=2)))
    assert (finding.step, finding.observed) == (2, None)


@pytest.mark.parametrize(
    ("meaning", "wrong"),
    [
        ({"of": "tonnes"}, "of"),
        ({"of": "tokens", "over": ("tp",)}, "over"),
        ({"of": "tokens", "labels": np.ones(1)}, "to"),
    ],
)
def test_an_impossible_meaning_is_refused(meaning: dict[str, Any], wrong: str) -> None:
    with pytest.raises(ValueError, match=wrong):
        Number(1.0, **meaning)


@pytest.mark.parametrize(
    ("trial", "meaning", "value", "details"),
    [
        (CP, RATE, lambda r, s: tokens(CP, s) / 0.25 / 2, ("not added up over", ("dp_shard",))),
        (GRID, {"of": "valid tokens"}, lambda r, s: valid(GRID, s, [r]), ("not added up over", ("dp_replicate", "dp_shard"))),
        (GRID, {"of": "valid tokens"}, lambda r, s: tokens(GRID, s), ("as a number of", "tokens")),
        (GRID, {"of": "tokens", "steps": None}, lambda r, s: tokens(GRID, s), ("of", "this step alone")),
        (GRID, {"of": "tokens"}, lambda r, s: tokens(GRID, s) / 4, ("not added up over", ("dp_replicate", "dp_shard"))),
        (GRID, {"of": "tokens"}, lambda r, s: 7 * tokens(GRID, s), ("times", 7.0)),
    ],
)  # fmt: skip
def test_the_meaning_that_a_wrong_number_has_is_named(trial: Trial, meaning: Any, value: Any, details: Any) -> None:
    assert proven(reporting(trial, value, **meaning)) == ("wrong report", {"report": "n", details[0]: details[1]})


def test_a_number_that_nothing_explains_is_stated() -> None:
    odd = reporting(GRID, lambda rank, step: tokens(GRID, step) + ((rank, step) == (3, 2)), of="tokens")
    assert kinds(odd) == ("wrong report",)


def test_a_count_of_the_recipe_is_no_finding_where_ranks_received_less() -> None:
    """The check `samples` says what was lost."""
    right = reporting(GRID, lambda rank, step: valid(GRID, step, [rank]), of="valid tokens", over=())
    (part,) = right.ranks[1].steps[1].microbatches
    fewer = replace(part, labels=None, valid_tokens=part.valid_tokens - 1)
    assert judged("reported_numbers", with_step(right, 1, 2, microbatches=(fewer,))).verdict is Verdict.PASS
    shorter = replace(part, tokens=part.tokens[1:])
    whole = reporting(GRID, lambda rank, step: tokens(GRID, step), of="tokens")
    assert judged("reported_numbers", with_step(whole, 1, 2, microbatches=(shorter,))).verdict is Verdict.PASS


def test_a_count_since_the_beginning_goes_on_behind_a_checkpoint_of_another_layout() -> None:
    trial = trial_of(tiny_case("hsdp_2x2", resume=(Saved(2, ParallelDims(dp_shard=2)),)))
    whole = trial.case.training.global_batch * trial.case.training.seq_len
    for rank in trial.ranks:
        trial = with_step(trial, rank, 3, numbers={"n": Number(3 * whole, of="tokens", steps=None)})
    assert (judged("reported_numbers", trial).verdict, judged("reported_numbers", trial).examined) == (Verdict.PASS, 4)
    only = with_step(trial, 3, 3, numbers={"n": Number(1, of="tokens", over=("dp_shard",), steps=None)})
    assert judged("reported_numbers", only).verdict is Verdict.UNKNOWN


# ---- means and norms


def length(trial: Trial, step: int, ranks: Any) -> float:
    """Valid tokens per sample, of some ranks."""
    rows = sum(len(part.tokens) for rank in ranks for part in trial.ranks[rank].steps[step - 1].microbatches)
    return valid(trial, step, ranks) / rows


def showing(trial: Trial, value: Any, per: str = "samples", more: float = 0.0) -> Trial:
    """value: a mean of valid tokens per sample, by rank and step. more: what ranks count besides their samples."""
    for rank, step in ((rank, step) for rank in trial.ranks for step in STEPS):
        rows = sum(len(part.tokens) for part in trial.ranks[rank].steps[step - 1].microbatches)
        own = {"total": valid(trial, step, [rank]), "count": rows / trial.case.dims.cp + more}
        trial = with_step(trial, rank, step, numbers={"n": Number(value(rank, step), of="mean", per=per, **own)})
    return trial


def test_a_mean_is_that_of_all_parts_over_what_was_received() -> None:
    for trial, cp in ((GRID, 1), (CP, 2)):
        right = showing(trial, lambda _, step, of=trial, cp=cp: cp * length(of, step, of.ranks))
        assert judged("reported_numbers", right).verdict is Verdict.PASS
    padded = showing(GRID, lambda _, step: valid(GRID, step) / (len(GRID.ranks) + 8), more=1.0)
    assert proven(padded) == (
        "wrong report",
        {"report": "n", "as a mean over": "what ranks say that they count"},
    )
    as_said = showing(GRID, lambda _, step: valid(GRID, step) / 12, per="", more=1.0)
    assert judged("reported_numbers", as_said).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("value", "details"),
    [
        (lambda r, s: length(GRID, s, [0]), ("as that of rank", 0)),
        (lambda r, s: length(GRID, s, [r]), ("not added up over", ("dp_replicate", "dp_shard"))),
        (lambda r, s: valid(GRID, s) / tokens(GRID, s), ("as a mean over", "tokens")),
    ],
)
def test_a_mean_of_something_else_is_named(value: Any, details: Any) -> None:
    assert proven(showing(GRID, value)) == ("wrong report", {"report": "n", details[0]: details[1]})


def test_a_mean_of_which_no_rank_hands_over_a_part_is_unknown() -> None:
    assert judged("reported_numbers", reporting(GRID, lambda *_: 1.0, of="mean")).verdict is Verdict.UNKNOWN


def test_a_mean_of_a_pipelines_stage_is_that_of_what_its_ranks_hand_over() -> None:
    trial = replace(GRID, case=tiny_case(ParallelDims(pp=2, dp_shard=2), model=replace(TINY, n_layers=2)))
    for rank in trial.ranks:
        trial = with_step(trial, rank, 1, numbers={"n": Number(1.0, of="mean", total=10.0 * rank, count=1)})
    for rank, parts in enumerate([[(0, 1), (10, 1)]] * 2 + [[(20, 1), (30, 1)]] * 2):
        assert sorted(mean_parts_of_rank(trial, 1, rank, "n", trial.ranks[rank].steps[0].numbers["n"])) == parts


def norm(trial: Trial, step: int, fqns: Any = None, ranks: Any = None) -> float:
    return norm_of_slices(trial, step, ranks, fqns, quantity=PARAMETERS)


def test_the_norm_of_parameters_is_that_of_all_that_ranks_hold() -> None:
    weights = whole_weights_after(GRID, 2)
    whole = sum(float(np.square(one, dtype=np.float64).sum()) for one in weights.values()) ** 0.5
    assert norm(GRID, 2) == pytest.approx(whole, rel=1e-14)
    shown = reporting(GRID, lambda rank, step: norm(GRID, step), of="parameter norm")
    assert judged("reported_numbers", shown).verdict is Verdict.PASS


@pytest.mark.parametrize(
    ("value", "details"),
    [
        (lambda r, s: norm(GRID, s, ranks=[r, r ^ 2]), ("not reduced over", ("dp_shard",))),
        (lambda r, s: norm(GRID, s, {*GRID.plan.shapes} - {"output.weight"}), ("with", "output.weight left out")),
        (lambda r, s: norm(GRID, s) ** 2, ("to the power of", 2)),
    ],
)
def test_another_norm_of_parameters_is_named(value: Any, details: Any) -> None:
    named = proven(reporting(GRID, value, of="parameter norm"))
    assert named == ("wrong report", {"report": "n", details[0]: details[1]})


def validating(ids: slice) -> Trial:
    """The second step is followed by an evaluation of these of the recipe's samples, by all ranks."""
    trial = trial_of(tiny_case("ddp_2", validate_every=2))
    reference = trial.reference
    batch = {"tokens": reference.tokens[ids], "labels": reference.labels[ids]}
    for rank in trial.ranks:
        trial = with_step(trial, rank, 2, numbers={"n": Number(5.0, of="validation loss", **batch)})
    return trial


def test_samples_that_were_trained_on_are_not_held_out() -> None:
    reference = validating(slice(0, 1)).reference
    step = {id_: step for step, ids in enumerate(reference.samples, 1) for id_ in ids}
    places = {step[id_]: at for at, id_ in enumerate(reference.sample_ids)}
    before, later = (validating(slice(places[step], places[step] + 1)) for step in (1, 3))
    (found,) = (one for one in findings("reported_numbers", before) if one.quantity == "validation")
    assert (found.step, found.expected, found.observed) == (2, 0, 2)
    assert not [one for one in judged("reported_numbers", later).findings if one.quantity == "validation"]


@pytest.mark.parametrize(
    ("rows", "masked", "found"),
    [
        ([-1, -2, -1], (), [((0,), 2, 1), ((1,), 2, 1)]),
        ([-1, -2, -1], (2,), []),  # padding that counts for nothing
        ([-1, -2, -1, -2], (), []),  # two validations of the same rows
    ],
)
def test_a_row_that_counts_twice_in_a_share_is_found(rows: list[int], masked: tuple[int, ...], found: Any) -> None:
    trial = trial_of(tiny_case("ddp_2", validate_every=2))
    tokens, labels = trial.reference.tokens[rows], trial.reference.labels[rows].copy()
    labels[[*masked]] = -100
    for rank in trial.ranks:
        shown = {"n": Number(5.0, of="validation loss", tokens=tokens, labels=labels)}
        trial = with_step(trial, rank, 2, numbers=shown)
    twice = [
        one for one in judged("reported_numbers", trial).findings if one.quantity == "repeated rows of the validation"
    ]
    assert [(one.ranks, one.step, one.observed) for one in twice] == found


def test_a_validation_of_the_same_samples_on_all_shares_is_unknown_unless_each_has_its_own_loss() -> None:
    trial = validating(slice(-1, None))
    number = trial.ranks[0].steps[1].numbers["n"]
    with pytest.raises(NotOnRecord, match="the same samples"):
        ExpectedNumbers(trial).expected_value(0, 2, "n", number)
    other = replace(number, tokens=trial.reference.tokens[:1], labels=trial.reference.labels[:1])
    apart = with_step(trial, 1, 2, numbers={"n": other})
    for right, shown in ((trial, replace(number, over=())), (apart, number)):
        assert right.ranks and 0 < ExpectedNumbers(right).expected_value(0, 2, "n", shown) < 10
