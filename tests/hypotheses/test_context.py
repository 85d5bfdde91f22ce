"""Context parallel on literal evidence: what the checks find and what is named when positions, attention or losses go wrong."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from caused import cause_of as first_cause_of
from caused import causes_of, data_of
from diagnosed import kinds, proven
from literal import (
    ADAMW,
    cause_of,
    judged,
    tiny_case,
    trial_of,
    with_collectives,
    with_every_rank,
    with_step,
    with_step_1_gradients,
)
from literal_ranks import microbatch_of

from harness.core.case.dims import ParallelDims
from harness.core.causes import diagnose
from harness.core.causes.pieces import Pieces, fit_weights
from harness.core.checks import judge
from harness.core.evidence.text import positions_text
from harness.core.judge.finding import Finding
from harness.core.judge.result import Verdict
from harness.core.judge.trial import Trial
from harness.core.plan.stages import token_positions_of_rank
from harness.hypotheses.received import wrong_positions

EIGHT = replace(ADAMW, seq_len=8)  # tokens enough that every part of a sample is one of a kind
CP_2, FSDP_2_CP_2 = ParallelDims(cp=2), ParallelDims(dp_shard=2, cp=2)
LAYOUTS = [
    CP_2,
    ParallelDims(cp=4),
    FSDP_2_CP_2,
    ParallelDims(dp_replicate=2, cp=2),
    ParallelDims(dp_replicate=2, dp_shard=2, cp=2),
    ParallelDims(cp=2, tp=2),
    ParallelDims(dp_shard=2, cp=2, tp=2),
]


def cp_trial(dims: ParallelDims = CP_2, **features: object) -> Trial:
    """Four tokens a cp rank."""
    return trial_of(tiny_case(dims, replace(EIGHT, seq_len=4 * dims.cp), **features))


def cause(trial: Trial) -> str:
    found = diagnose(trial, judge(trial))
    assert found is not None and not any("not diagnosed" in label for label, _ in found.evidence)
    return cause_of(found)


def named(trial: Trial, *details: str) -> tuple[Any, ...]:
    return data_of(first_cause_of(trial), *details)


def broken(trial: Trial) -> set[str]:
    return {result.check for result in judge(trial) if result.verdict is Verdict.FAIL}


def feeding(trial: Trial, rank: int, at: np.ndarray, *, told: np.ndarray | None = None) -> Trial:
    """A rank received its samples at other positions, in every step; told: what it says of them."""
    for number, ids in enumerate(trial.reference.samples, start=1):
        share = rank // (trial.case.dims.cp * trial.case.dims.tp)
        mine = ids[share * trial.case.local_batch :][: trial.case.local_batch]
        at_them = (microbatch_of(trial.reference, mine, at, trial.case.dims.cp),)
        trial = with_step(trial, rank, number, microbatches=at_them, positions=(at if told is None else told,))
    return trial


def telling(trial: Trial, rank: int, told: np.ndarray) -> Trial:
    return feeding(trial, rank, token_positions_of_rank(trial.case, rank, 8), told=told)


# ---- what a correct run leaves


@pytest.mark.parametrize("features", [{}, {"cp_load_balance": False}, {"cp_rotation": "alltoall"}], ids=str)
@pytest.mark.parametrize("dims", LAYOUTS, ids=str)
def test_a_correct_run_fails_no_check(dims: ParallelDims, features: dict) -> None:
    results = {result.check: result for result in judge(cp_trial(dims, **features))}
    assert {r.verdict for r in results.values()} == {Verdict.PASS, Verdict.NOT_APPLICABLE}, results
    assert results["positions"].examined == 3 * dims.world_size


# ---- positions


def test_positions_are_not_judged_where_the_model_is_told_none() -> None:
    assert judged("positions", trial_of(tiny_case("fsdp_2"))).verdict == Verdict.NOT_APPLICABLE


def test_a_rank_that_is_told_no_positions_while_others_are_is_found() -> None:
    trial = cp_trial()
    wanted = positions_text(token_positions_of_rank(trial.case, 1, 8))
    assert judged("positions", with_step(trial, 1, 2, positions=())).findings == (
        Finding.at(1, wanted, None, check="positions", step=2, quantity="positions"),
    )


def test_positions_of_another_cp_rank_are_found_also_in_one_row_of_many() -> None:
    trial = cp_trial(cp_load_balance=False)
    rows = np.stack([np.arange(4, 8), np.arange(4)])
    assert judged("positions", telling(trial, 1, rows)).findings == tuple(
        Finding.at(1, "4-7", "0-3", check="positions", step=step, quantity="positions") for step in (1, 2, 3)
    )


def test_each_step_of_variable_length_is_judged_by_the_positions_of_its_own_length() -> None:
    trial = trial_of(tiny_case(CP_2, replace(EIGHT, variable_length=True), cp_load_balance=False))
    assert judged("positions", trial).verdict is Verdict.PASS
    full = np.arange(4, 8)  # rank 1's in a step of 8 tokens; in one of 4 they are 2 and 3
    assert [trial.ranks[1].steps[step].positions[0].tolist() for step in (0, 1)] == [full.tolist(), [2, 3]]
    assert judged("positions", with_step(trial, 1, 2, positions=(full,))).findings == (
        Finding.at(1, "2-3", "4-7", check="positions", step=2, quantity="positions"),
    )


def test_a_later_stage_that_is_told_other_positions_than_the_first_is_named() -> None:
    trial = cp_trial(cp_load_balance=False)
    plan = replace(trial.plan, stages={0: (0,), 1: (1,)})  # rank 1 as it would be behind rank 0
    found = wrong_positions(replace(telling(trial, 1, np.arange(4)), plan=plan))
    assert found is not None and data_of(found, "ranks", "first") == ("positions", (1,), 0)


# ---- what a cp rank receives


def test_a_cp_rank_fed_its_peers_part_is_found_and_named() -> None:
    trial = feeding(cp_trial(ParallelDims(cp=4), cp_load_balance=False), 2, np.arange(12, 16))
    first = judged("samples", trial).findings[0]
    assert (first.rank, first.step, first.expected, first.observed) == (2, 1, "8-11", "12-15")
    assert named(trial) == ("sequence cut otherwise",)


def test_all_cp_ranks_fed_one_part_are_named() -> None:
    trial = feeding(cp_trial(cp_load_balance=False), 1, np.arange(4))
    assert named(trial) == ("sequence cut otherwise",)


def test_whole_sequences_on_every_cp_rank_are_named() -> None:
    trial = feeding(feeding(cp_trial(), 0, np.arange(8)), 1, np.arange(8))
    assert named(trial, "cp") == ("CP not applied", 2)


def test_a_load_balancer_that_is_not_applied_is_named() -> None:
    trial = feeding(feeding(cp_trial(), 0, np.arange(4)), 1, np.arange(4, 8))
    assert "cp_load_balance" in cause_of(diagnose(trial, judge(trial)))
    assert {*first_cause_of(trial).explains} == {"positions", "samples"}


def test_labels_that_are_wrong_beside_a_load_balancer_that_is_not_applied_are_named_as_well() -> None:
    trial = feeding(feeding(cp_trial(), 0, np.arange(4)), 1, np.arange(4, 8))
    (part,) = trial.ranks[0].steps[0].microbatches
    masked = np.where(part.labels == part.labels.max(), -100, part.labels)
    both = with_step(trial, 0, 1, microbatches=(replace(part, labels=masked),))
    assert [one.kind for one in causes_of(both)] == ["another load balance", "wrong labels"]


def test_cp_ranks_fed_different_samples_are_named() -> None:
    trial = cp_trial(FSDP_2_CP_2)
    part = (microbatch_of(trial.reference, (4, 5, 6, 7), token_positions_of_rank(trial.case, 1, 8), 2),)
    assert named(with_step(trial, 1, 1, microbatches=part), "axis", "ranks") == ("peers differ", "cp", (1,))


# ---- attention and traffic


def without(trial: Trial, op: str, phases: tuple[str, ...]) -> Trial:
    drop = lambda call: [] if call.op == op and call.phase in phases else [call]  # noqa: E731
    return with_every_rank(trial, lambda t, rank: with_collectives(t, rank, drop))


def test_another_rotation_than_requested_is_named() -> None:
    requested, ran = (tiny_case(CP_2, EIGHT, cp_rotation=rotation) for rotation in ("alltoall", "allgather"))
    assert broken(trial_of(requested, ran)) == {"traffic", "reshard"}  # keys are gathered as parameters are
    assert proven(trial_of(requested, ran)) == ("another feature", {"cp_rotation": "allgather"})


# ---- who holds what


def test_sharding_over_cp_alone_is_named_although_all_numbers_are_right() -> None:
    ran = tiny_case(ParallelDims(dp_replicate=2, cp=2), EIGHT)  # the same ranks, as HSDP
    trial = trial_of(tiny_case(FSDP_2_CP_2, EIGHT), ran)
    kind, details = proven(trial)
    assert kind == "another layout" and (details["dp_replicate"], details["dp_shard"], details["cp"]) == (2, 1, 2)


def test_whole_parameters_on_cp_ranks_that_exchange_nothing_are_named() -> None:
    trial = trial_of(tiny_case(CP_2, EIGHT), tiny_case("ddp_2", EIGHT))
    trial = feeding(
        feeding(trial, 0, token_positions_of_rank(trial.case, 0, 8)), 1, token_positions_of_rank(trial.case, 1, 8)
    )
    trial = without(trial, "all_reduce", ("backward",))
    seen = trial.ranks[1].steps[0].gradients
    trial = with_step(trial, 1, 1, gradients={fqn: 2 * gradient for fqn, gradient in seen.items()})
    assert {"another layout", "K/V not exchanged", "gradients not reduced"} <= {*kinds(trial)}


# ---- what a cp rank counts for


def with_parts(trial: Trial, weights: dict[int, list[float]]) -> Trial:
    """Gradients in which the eighths of the sequence count as given, by rank."""
    draw, known = np.random.default_rng(1), {}
    for fqn, full in trial.reference.steps[0].gradients.items():
        parts = draw.standard_normal((8, full.size))
        known[fqn] = parts + (full.ravel() - parts.sum(axis=0)) / 8
    trial = replace(trial, reference=replace(trial.reference, part_gradients=known))
    return with_step_1_gradients(trial, lambda rank, fqn: (weights[rank] @ known[fqn]).reshape(trial.plan.shapes[fqn]))


def test_the_weights_of_cp_ranks_are_found_from_the_gradient() -> None:
    trial = with_parts(cp_trial(), dict.fromkeys((0, 1), [2.0, 2.0, 0.5, 0.5, 0.5, 0.5, 2.0, 2.0]))
    pieces = Pieces(trial)
    fit = fit_weights(trial, pieces, pieces.gradients(1), 1)
    assert fit is not None
    counted = [number for number, count in enumerate(pieces.valid_tokens(1)) if count]
    assert {(pieces.all[n][2], round(w[n], 6)) for w in fit.weights.values() for n in counted} == {
        (0, 2.0),
        (1, 0.5),
    }
    assert proven(trial)[0] == "unequal contributions"


def test_a_mean_taken_on_each_cp_rank_is_named() -> None:
    trial = cp_trial(cp_load_balance=False)
    counts = [sum(m.valid_tokens or 0 for m in trial.ranks[rank].steps[0].microbatches) for rank in (0, 1)]
    first, second = (sum(counts) / (2 * count) for count in counts)
    trial = with_parts(trial, dict.fromkeys((0, 1), [first] * 4 + [second] * 4))
    kind, details = proven(trial)
    assert (kind, details["units"]) == ("averaged locally", ("cp rank",))


def test_a_reduction_over_cp_whose_result_is_dropped_is_named() -> None:
    trial = with_parts(cp_trial(cp_load_balance=False), {0: [1.0] * 4 + [0.0] * 4, 1: [0.0] * 4 + [1.0] * 4})
    kind, details = proven(trial)
    assert (kind, details["axes"]) == ("gradients not reduced", ("cp",))


# ---- what is reported


def showing(trial: Trial, peers: dict[int, tuple[int, ...]]) -> Trial:
    """Each rank reports the loss of these ranks' tokens, over the number of all."""
    for rank, others in peers.items():
        for step in trial.reference.steps:
            seen = [m for other in others for m in trial.ranks[other].steps[step.step - 1].microbatches]
            shown = sum(m.loss_sum or 0.0 for m in seen) / step.valid_tokens
            trial = with_step(trial, rank, step.step, reported_loss=shown)
    return trial


def test_a_displayed_loss_that_lacks_cp_is_named() -> None:
    told = "the loss is reported not reduced over cp, over the tokens of the step"
    over_dp = {0: (0, 2), 1: (1, 3), 2: (0, 2), 3: (1, 3)}
    assert cause(showing(cp_trial(FSDP_2_CP_2), over_dp)) == told
    own = {0: (0,), 1: (1,)}
    assert cause(showing(cp_trial(), own)) == told
