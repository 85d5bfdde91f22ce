"""Gradients that a DTensor left partial or uncut: what they are once settled, and what the checks then find."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from literal import judged, tiny_case, trial_of, with_every_rank, with_step

from harness.core.evidence.records import RankEvidence
from harness.core.evidence.step import UnsettledGradient
from harness.core.evidence.unsettled import with_settled_gradients
from harness.core.judge.result import Verdict
from harness.core.judge.traffic import observed_bytes_outside
from harness.core.judge.trial import Trial

NORM, EMBEDDING = "norm.weight", "tok_embeddings.weight"
MESH = [[0, 1], [2, 3]]


def rank_with(rank: int, lies: UnsettledGradient, gradient: np.ndarray) -> RankEvidence:
    evidence = trial_of(tiny_case("single")).ranks[0]
    step = replace(evidence.steps[0], gradients={NORM: gradient}, unsettled={NORM: lies})
    return replace(evidence, rank=rank, steps=(step,))


def lying(*placements: str, wanted: tuple[str, ...]) -> UnsettledGradient:
    return UnsettledGradient(MESH, placements, wanted, bytes=24, settled_bytes=8)


@pytest.mark.parametrize(
    ("placements", "wanted", "expected"),
    [
        (("Replicate", "Partial(sum)"), ("Replicate", "Replicate"), [[3, 3, 3], [3, 3, 3], [7, 7, 7], [7, 7, 7]]),
        (("Partial(sum)", "Replicate"), ("Replicate", "Replicate"), [[4, 4, 4], [6, 6, 6], [4, 4, 4], [6, 6, 6]]),
        (("Partial(sum)", "Partial(avg)"), ("Replicate", "Replicate"), [[5, 5, 5]] * 4),
        (("Replicate", "Replicate"), ("Replicate", "Shard(0)"), [[1, 1], [2], [3, 3], [4]]),
        (("Replicate", "Partial(sum)"), ("Replicate", "Shard(0)"), [[3, 3], [3], [7, 7], [7]]),
        (("Replicate", "Shard(0)"), ("Replicate", "Replicate"), [[1, 1, 1], [2, 2, 2], [3, 3, 3], [4, 4, 4]]),
    ],
)
def test_a_gradient_is_summed_over_its_partial_axes_and_cut_as_its_parameter(placements, wanted, expected):
    lies = lying(*placements, wanted=wanted)
    ranks = {rank: rank_with(rank, lies, np.full(3, float(rank + 1))) for rank in range(4)}
    settled = with_settled_gradients(ranks)
    assert [settled[rank].steps[0].gradients[NORM].tolist() for rank in range(4)] == expected


def test_a_partial_gradient_stays_as_it_is_without_the_other_summand():
    lies = lying("Replicate", "Partial(sum)", wanted=("Replicate", "Replicate"))
    settled = with_settled_gradients({0: rank_with(0, lies, np.ones(3))})
    assert settled[0].steps[0].gradients[NORM].tolist() == [1, 1, 1]


# ---- of a run


def partial_run(*, summed: bool = True) -> Trial:
    """Two tp ranks; each has half of the norm's gradient. summed: whether it is settled before it is judged."""
    trial = trial_of(tiny_case("tp_2"))
    for rank, evidence in trial.ranks.items():
        for step in evidence.steps:
            size = step.gradients[NORM].nbytes
            lies = UnsettledGradient([0, 1], ("Partial(sum)",), ("Replicate",), size, size)
            halves = step.gradients | {NORM: step.gradients[NORM] * (0.25 if rank else 0.75)}
            trial = with_step(trial, rank, step.step, gradients=halves, unsettled={NORM: lies})
    if not summed:
        return trial
    return replace(trial, run=replace(trial.run, ranks=trial.ranks | with_settled_gradients(trial.ranks)))


@pytest.mark.parametrize("check", ["gradients", "replica_agreement", "update"])
def test_halves_are_judged_by_their_sum(check):
    assert judged(check, partial_run()).verdict is Verdict.PASS
    assert judged(check, partial_run(summed=False)).verdict is Verdict.FAIL


def test_a_rank_that_steps_with_its_own_summand_is_found():
    trial = partial_run()
    first = trial.ranks[1].steps[0]
    wrong = first.parameters | {NORM: first.parameters[NORM] + 0.01}
    trial = with_step(trial, 1, 1, parameters=wrong)
    assert {(one.ranks, one.step) for one in judged("update", trial).findings} >= {((1,), 1)}
    assert judged("replica_agreement", trial).verdict is Verdict.FAIL


@pytest.mark.parametrize(("more", "verdict"), [(0, Verdict.PASS), (8, Verdict.FAIL)])
def test_memory_holds_the_part_that_is_not_cut_yet_and_no_more(more, verdict):
    def holding(trial: Trial, rank: int) -> Trial:
        whole = 2 * (slice_bytes := trial.ranks[rank].steps[0].gradients[EMBEDDING].nbytes)
        lies = UnsettledGradient([0, 1], ("Replicate",), ("Shard(0)",), whole, slice_bytes)
        planned = trial.plan.parameter_bytes[rank][1]
        memory = trial.ranks[rank].steps[0].memory | {"gradients": planned + slice_bytes + more}
        return with_step(trial, rank, 1, memory=memory, unsettled={EMBEDDING: lies})

    result = judged("memory", with_every_rank(trial_of(tiny_case("tp_2")), holding))
    assert result.verdict is verdict
    assert {(one.quantity, one.step) for one in result.findings} == ({("gradients", 1)} if more else set())


def moving(sums: int, filled_to: float) -> Trial:
    """A run that moves so many bytes outside of passes, and sums the partial gradient so often in addition."""
    trial = partial_run()
    for rank, evidence in trial.ranks.items():
        known = sum(observed_bytes_outside(evidence, 1).values())
        call = replace(evidence.collectives[0], op="all_reduce", ranks=(0, 1), step=1, phase="other")
        filler = replace(call, bytes=int(filled_to) - known)
        size = evidence.steps[0].unsettled[NORM].bytes
        settling = [replace(call, phase="optimizer", bytes=size) for _ in range(sums)]
        evidence = replace(evidence, collectives=(*evidence.collectives, filler, *settling))
        trial = replace(trial, run=replace(trial.run, ranks=trial.ranks | {rank: evidence}))
    return trial


@pytest.mark.parametrize(("sums", "verdict"), [(4, Verdict.PASS), (5, Verdict.FAIL)])
def test_settling_moves_a_partial_gradient_as_often_as_it_is_read(sums, verdict):
    limit = judged("traffic", moving(1000, 10_000)).findings[0].expected
    result = judged("traffic", moving(sums, limit.most))
    assert result.verdict is verdict
    assert {(one.phase, one.step) for one in result.findings} == ({("outside", 1)} if sums > 4 else set())
