"""What ranks are fed in place of the recipe's samples, labels and positions: what it is, who gets it, in which step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caused import cause_of, data_of
from diagnosed import dims, fsdp_4, received
from literal import ADAMW, judged, tiny_case, trial_of, with_step, with_step_1_gradients, without_step
from literal_ranks import microbatch_of
from resuming import FSDP_4, resumed
from trained import RECIPE, Ran, _ran, case_of, reference  # noqa: F401

from harness.core.case.case import Saved
from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.factors import step_distance_text
from harness.core.causes.words import rank_text
from harness.core.checks import judge
from harness.core.evidence.step import Microbatch
from harness.core.judge.losses import global_loss
from harness.core.judge.received_samples import samples_of_step
from harness.core.judge.trial import Trial
from harness.core.plan.stages import token_positions_of_rank
from harness.hypotheses.fed import other_samples, wrong_samples
from harness.hypotheses.received import Rows, assume_trained_on, labels_of_part, shift_of_labels, wrong_positions
from harness.hypotheses.received import rows_of_step as rows_of
from harness.reference.data import build_dataset, sample_order

IGNORED = -100
LENGTH_16 = replace(ADAMW, seq_len=16)
Change = Callable[[np.ndarray], np.ndarray]


def fed(trial: Trial, rank: int, step: int, *microbatches: list[int]) -> Trial:
    """A rank runs microbatches of these samples in a step."""
    parts = tuple(microbatch_of(trial.reference, ids) for ids in microbatches)
    return with_step(trial, rank, step, microbatches=parts)


def every(trial: Trial, step: int, ids: Callable[[int], list[int]]) -> Trial:
    for rank in trial.ranks:
        trial = received(trial, rank, step, ids(rank))
    return trial


def altered(trial: Trial, what: str, change: Change, ranks: Sequence[int] = (), step: int = 1) -> Trial:
    """The tokens or labels of each microbatch of these ranks (all) in a step."""
    for rank in ranks or trial.ranks:
        record = next(one for one in trial.ranks[rank].steps if one.step == step)
        parts = tuple(replace(part, **{what: change(getattr(part, what).copy())}) for part in record.microbatches)
        trial = with_step(trial, rank, step, microbatches=parts)
    return trial


ACCUMULATING = trial_of(tiny_case("ddp_2", accumulation=2))
SINGLE = trial_of(tiny_case("single", accumulation=2))


# ---- samples


@pytest.mark.slow("the engine tries its hypotheses on each; the first runs it in the same way", after=5)
@pytest.mark.parametrize(
    ("trial", "kind", "details"),
    [
        (received(fsdp_4(), 3, 1, [4, 5]), "same samples", {"step": 1, "ranks": (2, 3)}),
        (every(fsdp_4(), 1, lambda rank: [0, 1]), "same samples", {"ranks": (0, 1, 2, 3)}),
        (received(fsdp_4(), 3, 1, [5, 6]), "samples overlap", {"step": 1, "ranks": (2, 3)}),
        (received(fsdp_4(), 3, 3, [21, 22]), "samples overlap", {"step": 3, "ranks": (2, 3)}),
        (received(fsdp_4(), 3, 2, [14, 14]), "samples overlap", {"step": 2, "ranks": (3,)}),
        (received(fsdp_4(), 3, 1, [6]), "samples lost", {"step": 1, "samples": (7,)}),
        (every(fsdp_4(), 2, lambda rank: [2 * rank, 2 * rank + 1]), "data position", {"step": 2, "of_step": 1}),
        (received(fsdp_4(), 3, 1, [6, 9]), "data position", {"of_step": (2,), "ranks": (3,)}),
        (received(fsdp_4(), 3, 2, [14, 15, 0]), "data position", {"of_step": (1,), "ranks": (3,)}),
        (altered(fsdp_4(), "tokens", lambda tokens: tokens + 50, [2]), "samples of no step", {"ranks": (2,)}),
        (
            received(trial_of(tiny_case("fsdp_2_tp_2")), 1, 1, [4, 5, 6, 7]),
            "peers differ",
            {"axis": "tp", "ranks": (1,)},
        ),
        (every(ACCUMULATING, 2, lambda rank: [*range(8 + 4 * rank, 12 + 4 * rank)]), "microbatches", {"sizes": (4,)}),
        (fed(ACCUMULATING, 1, 2, [12, 13], [12, 13]), "microbatches repeated", {"microbatches": (2,), "ranks": (1,)}),
        (fed(ACCUMULATING, 1, 1, [4, 5], [4, 6]), "samples overlap", {"ranks": (1,)}),
        (fed(SINGLE, 0, 1, [0, 1, 2, 3], [0, 1, 2, 3]), "microbatches repeated", {"microbatches": (2,), "step": 1}),
    ],
)
def test_samples_that_are_not_the_ranks_own(trial: Trial, kind: str, details: dict[str, Any]) -> None:
    assert data_of(cause_of(trial), *details) == (kind, *details.values())


@pytest.mark.parametrize("ranks", [(0, 1), (1,)])
@pytest.mark.parametrize("step", [1, 2])
def test_samples_that_are_repeated_are_those_of_all_ranks_that_repeat_them(ranks: tuple[int, ...], step: int) -> None:
    trial = trial_of(tiny_case("fsdp_2"))
    for rank in ranks:
        own = list(trial.reference.samples[step - 1])[4 * rank : 4 * rank + 4]
        trial = received(trial, rank, step, [*own[:3], own[0]])
    cause = cause_of(trial)
    assert data_of(cause, "ranks", "step") == ("samples overlap", ranks, step)
    assert rank_text(ranks) in cause.observed


def test_microbatches_of_another_size_are_those_of_all_ranks() -> None:
    cause = cause_of(every(ACCUMULATING, 2, lambda rank: [*range(8 + 4 * rank, 12 + 4 * rank)]))
    assert data_of(cause, "ranks") == ("microbatches", (0, 1)) and rank_text((0, 1)) in cause.observed


def test_a_microbatch_that_goes_through_the_model_again_without_a_loss_is_a_pass_besides_training() -> None:
    trial = trial_of(tiny_case("single"))
    for record in trial.ranks[0].steps:
        (own,) = record.microbatches
        again = replace(own, loss_sum=None, labels=None, valid_tokens=None)
        trial = with_step(trial, 0, record.step, microbatches=(own, again))
    assert data_of(cause_of(trial), "microbatches") == ("odd traces", (2,))


def test_ranks_that_each_shuffle_by_themselves_overlap() -> None:
    trial = altered(fsdp_4(), "tokens", lambda tokens: tokens + 50, [3])
    trial = with_step(trial, 3, 2, microbatches=trial.ranks[1].steps[0].microbatches)
    assert cause_of(trial).kind == "samples overlap"


def test_what_follows_from_different_samples_of_tp_peers_is_not_tested() -> None:
    trial = received(trial_of(tiny_case("fsdp_2_tp_2")), 1, 1, [4, 5, 6, 7])
    trial = with_step_1_gradients(trial, lambda _, fqn: 1 + trial.reference.steps[0].gradients[fqn] ** 2)
    found = diagnose(trial, judge(trial))
    assert found is not None and found.kinds == ("peers differ",)
    assert {"not tested"} <= {*dict(found.evidence)} and not {"not explained", "tried"} & {*dict(found.evidence)}


def test_data_of_another_step_after_resuming_are_those_of_their_ranks() -> None:
    trial, whole = resumed(), trial_of(tiny_case(FSDP_4))
    for rank in (1, 2):
        trial = with_step(trial, rank, 3, microbatches=whole.ranks[rank].steps[1].microbatches)
    assert data_of(cause_of(trial), "of_step", "ranks") == ("data position", 2, (1, 2))


def test_what_is_lost_is_lost_from_the_divisor_as_well_or_for_one_choice_more_is_not() -> None:
    trial = received(fsdp_4(), 3, 1, [6])
    own = {step: global_loss(trial, step) for step in trial.case.steps}
    valid = sum(trial.ranks[rank].steps[0].microbatches[0].valid_tokens or 0 for rank in trial.ranks)
    share = valid / trial.reference.steps[0].valid_tokens
    for reported, seen in ((1.0, ("samples", "positions")), (share, ("samples", "reported_loss", "positions"))):
        shown = trial
        for rank, step, _ in list(trial.steps_with_reference()):
            loss = (own[step.step] or 0) * (reported if step.step == 1 else 1)
            shown = with_step(shown, rank, step.step, reported_loss=loss)
        found = list(other_samples(shown, {"samples": judged("samples", shown)}))
        assert [(one.fitted_count, one.seen_by, one.given_checks) for one in found] == [
            (1, seen, ("samples",)),
            (2, (), ("samples",)),
        ]


def test_rows_with_the_same_tokens_at_the_places_of_a_cp_rank_are_the_steps_own() -> None:
    trial = trial_of(tiny_case(ParallelDims(cp=2), LENGTH_16, cp_load_balance=False))
    tokens, (own, *_), other = trial.reference.tokens.copy(), trial.reference.samples[0], trial.reference.samples[1][0]
    rows = [trial.reference.sample_ids.index(id_) for id_ in (own, other)]
    tokens[rows[1], 8:] = tokens[rows[0], 8:]
    trial = replace(trial, reference=replace(trial.reference, tokens=tokens))
    received = samples_of_step(trial, 1).by_rank
    assert received[1] == received[0] == [*trial.reference.samples[0]]


# ---- how a data set's samples are dealt


def drawing(trial: Trial, ids: dict[int, Sequence[int]], step: int = 1) -> Trial:
    """By rank, the data set's samples that it receives; those without keep theirs."""
    data, length = build_dataset(trial.case.training, trial.case.model), trial.case.seq_len(step)
    for rank, of_rank in ids.items():
        rows = np.stack([data[index][0].numpy()[:length] for index in of_rank])
        trial = altered(trial, "tokens", lambda own, rows=rows: rows, [rank], step)
    return trial


def order_of(trial: Trial, epoch: int = 0) -> list[int]:
    return sample_order(trial.case.training, len(build_dataset(trial.case.training, trial.case.model)), epoch)


@pytest.mark.parametrize(
    ("drawn", "kind", "said"),
    [
        (lambda trial, rank: order_of(trial, 1)[rank:8:2], "samples of no step", "seed 1235"),
        (lambda trial, rank: order_of(trial, -1)[rank:8:2], "samples of no step", "seed 1233"),
        (lambda trial, rank: order_of(trial, -RECIPE.seed)[rank:8:2], "samples of no step", "seed 0"),
        (lambda trial, rank: [*range(8)][rank::2], "samples of no step", "not shuffled"),
        (lambda trial, rank: order_of(trial)[rank * len(order_of(trial)) // 2 :][:4], "samples of no step", "a block"),
    ],
)
def test_samples_in_another_order(ran: Ran, drawn: Callable[[Trial, int], list[int]], kind: str, said: str) -> None:
    trial = ran(case_of())
    cause = wrong_samples(drawing(trial, {rank: drawn(trial, rank) for rank in (0, 1)}))
    assert cause is not None and cause.kind == kind and said in data_of(cause, "order")[1]
    assert 1 in data_of(cause, "ranks")[1]


@pytest.mark.parametrize("length", [4, 3])
def test_rows_that_are_validated_on_are_no_position_in_the_data(ran: Ran, length: int) -> None:
    trial = ran(case_of())
    held_out = order_of(trial)[-8:]
    drawn = drawing(trial, {rank: held_out[rank::2] for rank in (0, 1)}, 3)
    cause = wrong_samples(drawn)
    assert cause is not None and cause.kind == "data position"
    for rank in (0, 1):
        (fed_,) = next(one for one in drawn.ranks[rank].steps if one.step == 3).microbatches
        assert fed_.tokens is not None
        seen = Microbatch(tokens=fed_.tokens[:length], labels=fed_.tokens[:length], loss_sum=1.0, valid_tokens=1)
        drawn = with_step(drawn, rank, 2, evaluated=(seen,))
    cause = wrong_samples(drawn)
    assert cause is not None
    assert (cause.kind, dict(cause.details).get("validated")) == (
        ("samples of no step", True) if length == 4 else ("data position", None)
    )


def test_an_order_that_nobody_deals_is_none(ran: Ran) -> None:
    trial = ran(case_of())
    for step in trial.case.steps:
        drawn = order_of(trial, 70)[8 * step - 8 : 8 * step]
        trial = drawing(trial, {rank: drawn[rank::2] for rank in (0, 1)}, step)
    cause = wrong_samples(trial)
    assert cause is not None and (cause.kind, dict(cause.details).get("order")) == ("samples of no step", None)


@pytest.mark.parametrize(("step", "kind"), [(1, "samples dealt otherwise"), (3, "samples of no step")])
def test_a_sampler_that_deals_out_to_more_ranks_than_read(ran: Ran, step: int, kind: str) -> None:
    trial = ran(case_of(ParallelDims(dp_shard=2, tp=2)))
    own, order = trial.case.training.global_batch // 2, order_of(trial)
    drawn = {rank: order[rank // 2 :: 4][(step - 1) * own : step * own] for rank in trial.ranks}
    cause = wrong_samples(drawing(trial, drawn, step))
    assert cause is not None and cause.kind == kind and "one of 4" in data_of(cause, "order")[1]


def test_a_sampler_that_deals_out_to_cp_ranks_too(ran: Ran) -> None:
    trial = ran(case_of(ParallelDims(dp_shard=2, cp=2), training=replace(RECIPE, seq_len=32)))
    data, length, order = build_dataset(trial.case.training, trial.case.model), trial.case.seq_len(1), order_of(trial)
    for rank in trial.ranks:
        at = token_positions_of_rank(trial.case, rank, length)
        rows = np.stack([data[index][0].numpy()[:length][at] for index in order[rank // 2 :: 4][: 8 // 2]])
        trial = altered(trial, "tokens", lambda own, rows=rows: rows, [rank])
    cause = wrong_samples(trial)
    assert cause is not None and cause.kind == "samples dealt otherwise" and "one of 4" in data_of(cause, "order")[1]


@pytest.mark.parametrize("step", [1, 2])
@pytest.mark.parametrize("ranks", [(0, 1), (0,), (1,)])
def test_ranks_that_read_on_too_far_in_their_own_share(ran: Ran, ranks: tuple[int, ...], step: int) -> None:
    trial = ran(case_of())
    cause = wrong_samples(drawing(trial, {rank: order_of(trial)[rank::2][13:17] for rank in ranks}, step))
    assert cause is not None and data_of(cause, "begins", "ranks", "step") == ("data position", 13, ranks, step)


def test_rows_that_begin_later_in_the_steps_samples(ran: Ran) -> None:
    trial = ran(case_of())
    known = {row.tobytes(): place for place, row in enumerate(trial.reference.tokens)}

    def later(rows: np.ndarray) -> np.ndarray:
        ends = [trial.reference.labels[known[row.tobytes()], -1] for row in rows]
        return np.hstack([rows[:, 1:], np.array(ends)[:, None]])

    cause = wrong_samples(altered(trial, "tokens", later))
    assert cause is not None and (cause.kind, dict(cause.details)["from_token"]) == ("samples of no step", 1)


# ---- labels


def masking(where: Change) -> Change:
    return lambda labels: np.where(where(labels), IGNORED, labels)


def at(*places: int) -> Change:
    return lambda labels: np.isin(np.arange(labels.shape[1]), places) & np.ones_like(labels, bool)


def shifted(by: int) -> Change:
    def moved(labels: np.ndarray) -> np.ndarray:
        found = np.full_like(labels, IGNORED)
        first, last = max(0, -by), labels.shape[1] - max(0, by)
        found[:, first:last] = labels[:, first + by : last + by]
        return found

    return moved


LONG = trial_of(tiny_case(dims(shard=4), LENGTH_16))
CP = trial_of(tiny_case(ParallelDims(cp=2), LENGTH_16, cp_load_balance=False))


@pytest.mark.parametrize("by", [-2, -1, 1, 2])
def test_labels_of_other_tokens_are_known_by_how_far_these_are(by: int) -> None:
    assert data_of(cause_of(altered(LONG, "labels", shifted(by))), "by") == ("labels shifted", by)


@pytest.mark.slow("many of a kind; the first run in the same way", after=2)
@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        (masking(lambda labels: labels >= 4), (), "masked"),
        (masking(at(5, 6, 7)), (), "masked"),
        (masking(at(5, 6, 7)), (2,), "masked"),
        (lambda labels: np.where(labels < 0, 3, labels), (), "should be masked"),
        (lambda labels: labels[::-1], (), "other rows"),
        (lambda labels: LONG.reference.labels[[*LONG.reference.samples[1]]][: len(labels)], (1,), "those of step 2"),
        (lambda labels: np.where(labels >= 0, 0, labels), (2,), ""),
    ],
)
def test_labels_that_are_not_the_samples(change: Change, ranks: tuple[int, ...], said: str) -> None:
    kind, of, words = data_of(cause_of(altered(LONG, "labels", change, ranks)), "ranks", "labels")
    assert kind == "wrong labels" and of == (ranks or (0, 1, 2, 3))
    assert said in words if said else words == ""


def test_labels_that_are_shifted_before_they_are_cut_over_cp() -> None:
    parts = [CP.ranks[rank].steps[0].microbatches[0] for rank in (0, 1)]
    moved = shifted(1)(np.hstack([part.labels for part in parts if part.labels is not None]))
    trial = CP
    for rank, part in enumerate(parts):
        trial = with_step(trial, rank, 1, microbatches=(replace(part, labels=moved[:, 8 * rank : 8 * rank + 8]),))
    assert data_of(cause_of(trial), "by") == ("labels shifted", 1)


def test_labels_that_are_cut_over_cp_otherwise_than_the_tokens() -> None:
    whole, trial = np.hstack([CP.ranks[rank].steps[0].microbatches[0].labels for rank in (0, 1)]), CP  # type: ignore[misc]
    for rank, cut in enumerate(([*range(4), *range(12, 16)], [*range(4, 12)])):
        part = replace(CP.ranks[rank].steps[0].microbatches[0], labels=whole[:, cut])
        trial = with_step(trial, rank, 1, microbatches=(part,))
    _, words = data_of(cause_of(trial), "labels")
    assert words.startswith("rank 0 has the labels of positions 0-3 and 12-15 for its tokens at 0-7")
    assert words.endswith("as by cp_load_balance True, tokens by False")


def test_labels_that_are_shifted_in_the_part_of_each_cp_rank() -> None:
    assert data_of(cause_of(altered(CP, "labels", lambda labels: labels[:, 1:])), "by") == ("labels shifted", 1)


def test_tokens_that_are_their_own_labels_are_not_shifted(ran: Ran) -> None:
    trial = ran(case_of())
    for rank, record, _ in list(trial.steps_with_reference()):
        parts = tuple(
            replace(part, labels=np.where(part.labels >= 0, part.tokens, IGNORED))
            for part in record.microbatches
            if part.labels is not None and part.tokens is not None
        )
        trial = with_step(trial, rank, record.step, microbatches=parts)
    assert data_of(cause_of(trial), "by") == ("labels shifted", -1)


def test_labels_that_are_too_few_are_known_by_their_shift_or_their_number() -> None:
    assert data_of(cause_of(altered(LONG, "labels", lambda labels: labels[:, 1:])), "by") == ("labels shifted", 1)
    cause = cause_of(altered(LONG, "labels", lambda labels: labels[:, :-3], step=2))
    assert cause.kind == "labels lost" and cause.finding is not None and cause.finding.step == 2


def test_a_shift_is_known_of_labels_whose_loss_is_computed_in_chunks() -> None:
    trial = LONG
    for rank in trial.ranks:
        (part,) = trial.ranks[rank].steps[0].microbatches
        assert part.labels is not None
        moved = shifted(1)(part.labels)
        halves = np.concatenate([moved[:, :8].reshape(-1), moved[:, 8:].reshape(-1)])
        part = replace(part, labels=halves, chunks=(halves.size // 2,) * 2)
        trial = with_step(trial, rank, 1, microbatches=(part,))
    assert data_of(cause_of(trial), "by") == ("labels shifted", 1)


def test_labels_lie_as_their_tokens_where_those_that_do_not_count_are_left_out() -> None:
    own = np.array([[1, 2, IGNORED, 3, 4, 5, 6, 7], [8, 9, 1, IGNORED, 2, 3, 4, 5]])
    part = Microbatch(tokens=own, labels=own[:, 1:], loss_sum=1.0, valid_tokens=12)
    laid = labels_of_part(part, own)
    assert laid is not None and laid.tolist() == [[*row[1:], IGNORED] for row in own.tolist()]
    laid = labels_of_part(replace(part, labels=own[own >= 0]), own)
    assert laid is not None and laid.tolist() == own.tolist()
    assert [shift_of_labels(shifted(by)(own)[:, : 8 - max(by, 0)], own) for by in (0, 1, 2)] == [0, 1, 2]
    assert shift_of_labels(own[:, :3], own) is None


# ---- rows, put together


@pytest.mark.parametrize("layout", [dims(shard=4), ParallelDims(cp=2), ParallelDims(dp_shard=2, cp=2, tp=2)])
@pytest.mark.parametrize("balanced", [True, False])
def test_what_ranks_received_makes_up_the_samples_of_the_step(layout: ParallelDims, balanced: bool) -> None:
    trial = trial_of(tiny_case(layout, LENGTH_16, cp_load_balance=balanced))
    rows = rows_of(trial, 2)
    assert rows is not None and rows.is_one_label_a_token
    places = [trial.reference.sample_ids.index(id_) for id_ in trial.reference.samples[1]]
    assert rows.tokens.tolist() == trial.reference.tokens[places].tolist()
    assert rows.labels.tolist() == trial.reference.labels[places].tolist()
    assert rows_of(without_step(trial, 0, 2), 2) is None
    short = altered(trial, "tokens", lambda tokens: tokens[:, :-1], [0], 2)
    assert layout.cp == 1 or rows_of(short, 2) is None


def test_samples_that_are_known_keep_their_numbers_and_others_get_the_next(ran: Ran) -> None:
    trial = ran(case_of())
    rows = rows_of(trial, 1)
    assert rows is not None
    strange = rows.tokens.copy()
    strange[0] = 31 - strange[0]
    found = assume_trained_on(trial, {1: Rows(strange, rows.labels)}).reference
    assert found.samples[0] == (max(trial.reference.sample_ids) + 1, *trial.reference.samples[0][1:])
    assert found.samples[1:] == trial.reference.samples[1:]
    assert found.tokens[-1].tolist() == strange[0].tolist()
    twice = np.vstack([rows.tokens[:1], rows.tokens[:1]])
    labels = np.vstack([rows.labels[:1], np.roll(rows.labels[:1], 1)])
    assert len({*assume_trained_on(trial, {1: Rows(twice, labels)}).reference.samples[0]}) == 2


def test_right_samples_have_no_cause() -> None:
    assert wrong_samples(LONG) is None and wrong_samples(CP) is None and wrong_positions(CP) is None
    assert not list(other_samples(LONG, {}))
    assert token_positions_of_rank(CP.case, 1, 16).tolist() == [*range(8, 16)]


def test_the_distance_of_samples_that_are_another_steps_is_said_where_it_is_a_known_one() -> None:
    shards = ParallelDims(dp_shard=2)
    plain = trial_of(tiny_case("fsdp_2"))
    resumed = trial_of(tiny_case("fsdp_2", resume=(Saved(2, shards),)))
    anew = trial_of(tiny_case("fsdp_2", resume=(Saved(2, shards, model_only=True),)))
    epoch = plain.case.training.made_samples // plain.case.training.global_batch
    told = {
        "": step_distance_text(plain, 2, 1),
        "as if those of one step were passed over": step_distance_text(plain, 2, 3),
        "as if the data began anew": step_distance_text(resumed, 3, 1),
        "as if the epoch had the order of the one before": step_distance_text(plain, epoch + 2, 2),
        "as if more than the weights were taken from the checkpoint": step_distance_text(anew, 1, 3),
    }
    assert [*told] == [*told.values()]
